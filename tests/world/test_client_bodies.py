"""The bodies of real clients before a node with a scripted engine: each is a 200, and all of it is in the prompt.

A third of them runs in each `make test`; the others are slow. Whole clusters have them in `test_clients_served.py`.
"""

from __future__ import annotations

import contextlib
import json
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

import pd_cluster
from pd_cluster.config import ModelConfig, NodeConfig, ServerConfig
from pd_cluster.server.app import create_app
from pd_cluster.server.state import NodeState
from tests.server.fake_engine import FakeEngine, says
from tests.world.bodies import FOLDER, MARK, client_specs, marks, prose
from tests.world.shown import not_shown

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.anyio

TOOL_MODEL = Path(pd_cluster.__file__).parent / "tool_model"
TEMPLATE = Path(__file__).parent / "clients.jinja"
SPECS = client_specs()
ANSWER_DEADLINE_S = 60.0
IGNORED = "x-pd-ignored"
MAX_MODEL_LEN = 1 << 18  # the tokenizer of `tool_model` makes two tokens of a word
MAX_FOLDER_BYTES = 300_000
SHARED = 0.9  # of the first turn's prompt at the beginning of the second's
QUICK = {
    ("codex", "second"), ("codex", "additional_tools"), ("claude_code", "compacted"), ("opencode_chat", "cancelled"),
    ("open_webui", "compacted"), ("ai_sdk_messages", "second"), ("cline_text_calls", "second"),
}  # fmt: skip
ALL = [
    pytest.param(
        client, request, id=f"{client}-{request}", marks=[] if (client, request) in QUICK else pytest.mark.slow
    )
    for client, spec in SPECS.items()
    for request in spec.requests
]


class Sent(NamedTuple):
    body: dict[str, Any]
    status: int
    text: str
    ignored: str
    prompt: str
    ids: list[int]


class Bodies:
    """A node with a scripted engine that takes long prompts."""

    def __init__(self) -> None:
        self._engine = FakeEngine(says([5]), max_model_len=MAX_MODEL_LEN)
        model = ModelConfig(model=str(TOOL_MODEL), served_model_name=("m",), chat_template=str(TEMPLATE))
        self._state = NodeState.load(NodeConfig(model=model, server=ServerConfig(node_id="node")), self._engine)
        transport = httpx.ASGITransport(create_app(self._state))
        self._http = httpx.AsyncClient(transport=transport, base_url="http://node", timeout=ANSWER_DEADLINE_S)

    async def send(self, client: str, request: str, label: int = 0) -> Sent:
        """`label`: the number of the request."""
        body = SPECS[client].body(request, "m", label=label, stream=False)
        self._engine.requests.clear()
        answer = await self._http.post(SPECS[client].path, json=body)
        ids = [token_id for one in self._engine.requests for token_id in one.prompt_token_ids]
        prompt = await self._state.tokenizer.decode(ids, skip_special=False)
        return Sent(body, answer.status_code, answer.text, answer.headers.get(IGNORED, ""), prompt, ids)

    def close(self) -> None:
        """The app's lifespan does not run. A body with a schema has started the process that checks grammars."""
        self._state.grammar_checks.close()
        self._state.tokenizer.close()


@pytest.fixture(scope="module")
def bodies() -> Iterator[Bodies]:
    with contextlib.closing(Bodies()) as bodies:
        yield bodies


@pytest.mark.parametrize(("client", "request_name"), ALL)
async def test_all_of_a_body_is_in_the_prompt(client: str, request_name: str, bodies: Bodies) -> None:
    sent = await bodies.send(client, request_name)
    assert sent.status == 200, sent.text
    assert not_shown(sent.body, sent.prompt, sent.ignored) == []
    for block in json.loads(sent.text).get("content", ()):  # of Messages
        assert None not in block.values(), "the AI SDK refuses a member that is null"


@pytest.mark.parametrize("client", [client for client in SPECS if "second" in SPECS[client].requests])
@pytest.mark.slow
async def test_the_second_turn_begins_as_the_first_one_does(client: str, bodies: Bodies) -> None:
    """Each request has another label."""
    first = await bodies.send(client, "first", label=1)
    second = await bodies.send(client, "second", label=2)
    assert (first.status, second.status) == (200, 200), second.text
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first.ids, second.ids, strict=False)))
    assert num_shared >= SHARED * len(first.ids)


@pytest.mark.parametrize("client", SPECS)
@pytest.mark.slow
async def test_the_head_of_a_spec_names_what_is_left_out(client: str, bodies: Bodies) -> None:
    """The page "Clients" says so."""
    headers = [(await bodies.send(client, request)).ignored for request in SPECS[client].requests]
    assert sorted({name for header in headers for name in header.split(",") if name}) == SPECS[client].head["left_out"]


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_FOLDER_BYTES


def test_texts_have_their_length_and_marks_of_their_own() -> None:
    texts = [prose(num, f"{num}") for num in (5, 12, 26, 40, 4000)]
    assert [len(text) for text in texts] == [12, 12, 26, 40, 4000]
    assert [len(MARK.findall(text)) for text in texts] == [1, 1, 2, 2, 2]
    for spec in SPECS.values():
        for request in spec.requests:
            found = [one.text for one in marks(spec.body(request, "m"))]
            assert len(found) == len(set(found)), (spec.name, request)
