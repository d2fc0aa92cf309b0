"""Texts that lie on every machine with these tests, asked for with OpenAI's client: drafts change none of the answers.

The demo model copies nothing. A grammar makes it: an answer is one of two texts, or JSON by the schema of its prompt.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import textwrap
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.integration.test_sampling_parity import same_numbers
from tests.lookup_nodes import LookupNode, running, workers
from tests.router.test_cut_through_router import CutNode
from tests.server.live_server import demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.lookup_nodes import Worker

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

MOST_PROMPT, MOST_ANSWER = 500, 60  # tokens
PROMPT_CHARS = 700
SCHEMAS = Path("kubernetes_validate/kubernetes-json-schema")


def licence() -> str:
    text = metadata.distribution("pytest").read_text("licenses/LICENSE")
    assert text
    return text


def readme() -> str:
    _, _, text = (metadata.distribution("httpx").read_text("METADATA") or "").partition("\n\n")
    assert text
    return text


def schema(name: str) -> dict[str, Any]:
    """Of an object of Kubernetes, as its newest release has it."""
    folder = Path(str(metadata.distribution("kubernetes-validate").locate_file(SCHEMAS)))
    found: dict[str, Any] = json.loads(max(folder.glob(f"*-local/{name}.json")).read_text())
    return found


def asked_of(text: str, **more: Any) -> dict[str, Any]:
    """About a text. Its beginning is predicted to come again."""
    shown = text.strip()[:PROMPT_CHARS]
    prediction = {"type": "content", "content": shown[:200]}
    return {"messages": [{"role": "user", "content": f"Repeat:\n{shown}"}], "prediction": prediction} | more


def copied(text: str, **more: Any) -> dict[str, Any]:
    """A part of it is the answer, or the same without its first words."""
    begin = text.strip()[:PROMPT_CHARS][:90]
    extra = {"extra_body": {"guided_choice": [begin, begin.partition(" ")[2] or begin[1:]]}}
    return asked_of(text, **extra, **more)


def filled(name: str, **more: Any) -> dict[str, Any]:
    """JSON by a schema that is in the prompt; `prediction` in parts."""
    wanted = schema(name)
    text = json.dumps(dict.fromkeys(wanted["properties"], "string"), indent=1)
    form = {"type": "json_schema", "json_schema": {"name": "object", "schema": wanted}}
    parts = [{"type": "text", "text": half} for half in (text[:20], text[20:])]
    asked = asked_of(f"{json.dumps(wanted)[:400]}\n{text}", response_format=form, **more)
    return asked | {"prediction": {"type": "content", "content": parts}}


SEEDED = {"temperature": 0.8, "seed": 3}
SOURCE = textwrap.dedent(inspect.getsource(json.JSONDecoder.decode))
CASES: dict[str, dict[str, Any]] = {
    "licence": asked_of(licence(), temperature=0, logprobs=True, top_logprobs=2),
    "README": asked_of(readme(), n=2, **SEEDED),
    "source": asked_of(SOURCE, temperature=0, stop=["\n\n"], frequency_penalty=0.3),
    "licence copied": copied(licence(), n=2, logprobs=True, **SEEDED),
    "README copied": copied(readme(), temperature=0),
    "source copied": copied(SOURCE, temperature=0, logprobs=True),
    "sysctl": filled("sysctl-v1", temperature=0),
    "host alias": filled("hostalias-v1", **SEEDED),
}
ACCEPTED = {"licence copied", "README copied", "source copied", "sysctl"}
SOME = ("licence", "README copied", "sysctl")


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Worker]]:
    with workers("d0", "d1") as found:
        yield found


@contextlib.asynccontextmanager
async def client_of(node: LookupNode) -> AsyncIterator[Any]:
    async with (
        CutNode(node.app, set()).serving() as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120.0) as client,
    ):
        yield client


async def answer(client: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What both nodes must agree in."""
    told = await client.chat.completions.create(model="m", max_completion_tokens=MOST_ANSWER, **asked)
    assert told.usage.completion_tokens_details.accepted_prediction_tokens >= 0
    found: dict[str, Any] = told.model_dump(exclude={"id", "created"})
    return found


async def streamed(client: Any, asked: dict[str, Any]) -> tuple[dict[int, str], Any]:
    """Texts by choice, and the usage."""
    texts, usage = dict[int, str](), None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async for event in await client.chat.completions.create(
        model="m", max_completion_tokens=MOST_ANSWER, **asked, **options
    ):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts, usage and usage.model_dump()


@pytest.mark.long
@pytest.mark.parametrize(
    "names", [pytest.param(tuple(CASES), id="all", marks=pytest.mark.slow), pytest.param(SOME, id="some")]
)
async def test_texts_of_others(found: dict[str, Worker], names: tuple[str, ...]) -> None:
    accepted = dict[str, int]()
    async with (
        running(found, {"d0"}) as nodes, client_of(nodes["d0"]) as drafting, client_of(nodes["d1"]) as alone,
    ):  # fmt: skip
        for name in names:
            asked, before = CASES[name], nodes["d0"].num_accepted
            mine, single = await answer(drafting, asked), await answer(alone, asked)
            same_numbers(mine, single)
            assert single["usage"]["prompt_tokens"] <= MOST_PROMPT
            assert single["usage"]["completion_tokens"] <= MOST_ANSWER * asked.get("n", 1)
            accepted[name] = nodes["d0"].num_accepted - before
            texts, usage = await streamed(drafting, asked)
            assert texts == {choice["index"]: choice["message"]["content"] for choice in single["choices"]}
            assert usage == single["usage"]
            if "copied" in name:
                assert single["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 20
        assert min(accepted[name] for name in ACCEPTED & {*names}) > 5, accepted


def test_the_tokenizer_splits_and_joins_them() -> None:
    """Or a prediction would have other tokens than the answer that it is."""
    tokenizer = demo_tokenizer()
    try:
        for text in (licence(), readme(), SOURCE, json.dumps(schema("sysctl-v1"))):
            assert tokenizer.text_of(tokenizer._encode(text[:2000], False)) == text[:2000]
    finally:
        tokenizer.close()
