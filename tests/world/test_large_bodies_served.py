"""The largest bodies that real clients send, before a cluster of processes: all served; one member more is a 400.

The model has a tiny shape, random weights and 131,072 positions. `tests/server/test_member_limits.py` makes the bodies.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tokenizers import Tokenizer

from pd_cluster.server.grammar.grammar_checks import MAX_GRAMMAR_BYTES
from tests.cluster import Launcher
from tests.integration.system import Path as Route
from tests.patient_node import IMPATIENT
from tests.server.test_member_limits import CHAT, HI, ONE_MORE, SERVED
from tests.shallow_model import DEMO_MODEL
from tests.world.test_clients_served import LIMITS, usage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]

MAX_LEN = 131_072
ANSWER_DEADLINE_S = 300.0
# Two fill the context. llguidance follows a schema with some 250 members that may be left out, and that one has 1,300
BODIES = [name for name in SERVED if name not in ("a long prompt of ids", "256 prompts", "a schema of 64 KB")]
# the demo has a token for each mark; published vocabularies have 3 to 4 characters of JSON in one, and so have these
PIECES = (
    "ab,[c{", '": {"type": "string", "description": "what it is"}', '"argument_', '{"type": "text", "text": "',
    '{"type": "object", "properties": {"', '": {"enum": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}, "p',
    '{"type": "function", "function": {"name": "', '", "parameters": ', '{"path": "a.py", "lines": [1, 2]}',
)  # fmt: skip
SHAPE = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": MAX_LEN,
}  # fmt: skip


def write_model(directory: Path) -> None:
    """The demo's tokenizer with PIECES, and its template."""
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(DEMO_MODEL / name, directory / name)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_tokens(list(PIECES))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | SHAPE | {"vocab_size": tokenizer.get_vocab_size()}))


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    directory = tmp_path_factory.mktemp("large")
    write_model(directory)
    flags = (f"--model={directory}", "--load-format=dummy", "--kv-cache-gb=0.2", "--min-remote-tokens=1")
    with Launcher() as launcher:
        prefill, decode = (
            launcher.node(role, *flags, environment=IMPATIENT, wait=False) for role in ("prefill", "decode")
        )
        for node in (prefill, decode):
            node.wait_line("ready: ")
        yield launcher.router(prefill=[prefill], decode=[decode]).url


def ask(router: str, path: str, body: dict[str, Any], route: Route = Route.P_FIRST) -> httpx.Response:
    limit = LIMITS.get(path, "max_tokens")
    headers = {"x-pd-route": route.value}
    return httpx.post(
        router + path, json=body | {limit: 2}, headers=headers, timeout=ANSWER_DEADLINE_S, trust_env=False
    )


def failed_legs(router: str) -> list[str]:
    text = httpx.get(f"{router}/metrics", timeout=ANSWER_DEADLINE_S, trust_env=False).text
    return [line for line in text.splitlines() if line.startswith(("pd_router_leg_failures", "pd_router_legs_moved"))]


@pytest.mark.parametrize("name", BODIES)
def test_a_large_body_is_served(name: str, router: str) -> None:
    path, body = SERVED[name]
    answer = ask(router, path, body)
    assert answer.status_code == 200, answer.text
    assert usage(path, answer).prompt > 5000


def test_eight_at_once_are_served(router: str) -> None:
    """D-first. No node is judged frozen, here or before."""
    names = BODIES[:8]
    with ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(lambda name: ask(router, *SERVED[name], Route.D_FIRST), names))
    assert {name: answer.text for name, answer in zip(names, answers, strict=True) if answer.status_code != 200} == {}
    assert failed_legs(router) == []


@pytest.mark.parametrize(("path", "body", "told"), ONE_MORE)
def test_one_member_more_is_a_400(path: str, body: dict[str, Any], told: str, router: str) -> None:
    answer = ask(router, path, body)
    assert (answer.status_code, told in answer.text) == (400, True), answer.text


def formed(num_bytes: int) -> dict[str, Any]:
    """A request for an answer with a schema of almost that size, in which no member may be left out."""
    names = [f"p{i}" for i in range(num_bytes // 32)]
    schema = {"type": "object", "properties": {name: {"enum": [1, 2]} for name in names}, "required": names}
    schema["title"] = "t" * (num_bytes - len(json.dumps(schema, separators=(",", ":"))) - 11)
    return {
        "messages": HI,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }


def test_a_schema_at_its_bound_is_served_and_one_byte_more_is_not(router: str) -> None:
    answer = ask(router, CHAT, formed(MAX_GRAMMAR_BYTES))
    assert answer.status_code == 200, answer.text
    answer = ask(router, CHAT, formed(MAX_GRAMMAR_BYTES + 1))
    assert (answer.status_code, f"{MAX_GRAMMAR_BYTES} are allowed" in answer.text) == (400, True), answer.text


def test_more_than_the_context_is_a_400(router: str) -> None:
    answer = ask(router, "/v1/completions", {"prompt": [7] * MAX_LEN})
    assert (answer.status_code, str(MAX_LEN) in answer.text) == (400, True), answer.text
