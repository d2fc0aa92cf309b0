"""`prediction` of chat: shapes and bounds, what the engine gets, what the usage says. It changes no answer."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.protocol.messages import FinishReason, Work
from pd_cluster.server.bodies.fields import IGNORED_HEADER
from pd_cluster.server.bodies.schema import ChatBody, decode_body
from pd_http.dialects import MESSAGES, RESPONSES
from pd_http.member_bounds import CHAT_BOUNDS
from pd_router.calls.body import RequestBody
from tests.cut_streams import Said, continuation_of, continuing, data_of
from tests.server.cut_nodes import SCRIPTED, Pair
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import Node, demo_tokenizer, running
from tests.server.sse import post_events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
TEXT = "The fox and the hen."
TEXTS = [{"type": "text", "text": "The fox and "}, {"type": "text", "text": "the hen."}]


@pytest.fixture
async def ids() -> list[int]:
    return await ids_of(TEXT)


@pytest.fixture
async def node(ids: list[int]) -> AsyncIterator[Node]:
    """It answers TEXT, and drafts."""
    async with running(FakeEngine(says(ids, FinishReason.LENGTH)), speculation="lookup") as node:
        yield node


async def ids_of(text: str) -> list[int]:
    tokenizer = demo_tokenizer()
    try:
        return await tokenizer.encode(text, max_tokens=4096)
    finally:
        tokenizer.close()


async def ask(node: Node, **more: Any) -> tuple[int, dict[str, Any], str | None]:
    async with node.session.post(f"{node.url}{CHAT}", json={"messages": HI} | more) as answer:
        return answer.status, await answer.json(), answer.headers.get(IGNORED_HEADER)


def content(value: Any) -> dict[str, Any]:
    return {"type": "content", "content": value}


@pytest.mark.parametrize("value", [TEXT, TEXTS])
async def test_the_engine_gets_its_tokens_and_the_usage_says_how_many_came(
    value: Any, node: Node, ids: list[int]
) -> None:
    status, answer, ignored = await ask(node, prediction=content(value))
    assert (status, ignored) == (200, None)
    (request,) = node.engine.requests
    assert request.prediction == tuple(ids)
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": len(ids),
        "rejected_prediction_tokens": 0,
    }


async def test_an_engine_that_drafts_nothing_of_it_does_not_get_it(node: Node, ids: list[int]) -> None:
    """The usage has it all the same."""
    whole = {"accepted_prediction_tokens": len(ids), "rejected_prediction_tokens": 0}
    async with running(FakeEngine(says(ids, FinishReason.LENGTH))) as plain:
        _, answer, _ = await ask(plain, prediction=content(TEXT))
        assert plain.engine.requests[0].prediction == ()
        assert answer["usage"]["completion_tokens_details"] == whole
    await ask(node, prediction=content(TEXT), use_beam_search=True, n=2, max_tokens=4)
    (request,) = node.engine.requests
    assert request.sampling.beams is not None
    assert request.prediction == ()


async def test_null_is_as_if_it_were_absent_and_an_empty_one_has_no_tokens(node: Node) -> None:
    plain: list[dict[str, Any]] = [{}, {"prediction": None}]
    for more in plain:
        _, answer, ignored = await ask(node, **more)
        assert "completion_tokens_details" not in answer["usage"]
        assert (node.engine.requests[-1].prediction, ignored) == ((), None)
    _, answer, _ = await ask(node, prediction=content(""))
    details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert answer["usage"]["completion_tokens_details"] == details


async def test_what_the_answer_has_not_is_rejected(node: Node, ids: list[int]) -> None:
    more = await ids_of(f"{TEXT} More")
    assert more[: len(ids)] == ids
    _, answer, _ = await ask(node, prediction=content(f"{TEXT} More"), n=3, logprobs=True)
    assert answer["usage"]["completion_tokens"] == 3 * len(ids)
    details = {"accepted_prediction_tokens": 3 * len(ids), "rejected_prediction_tokens": 3 * (len(more) - len(ids))}
    assert answer["usage"]["completion_tokens_details"] == details


async def test_a_stream_says_it_in_its_last_chunk_and_in_each_if_asked(node: Node, ids: list[int]) -> None:
    body = {"messages": HI, "stream": True, "prediction": content(TEXT)}
    options = {"include_usage": True, "continuous_usage_stats": True}
    for more in ({"include_usage": True}, options):
        events = await post_events(node.session, f"{node.url}{CHAT}", body | {"stream_options": more})
        usages = [data["usage"] for _, data in events if data != "[DONE]" and data.get("usage")]
        assert len(usages) == 1 or more is options
        told = [usage["completion_tokens_details"] for usage in usages]
        assert told[-1] == {"accepted_prediction_tokens": len(ids), "rejected_prediction_tokens": 0}
        for usage, details in zip(usages, told, strict=True):
            assert details["accepted_prediction_tokens"] == usage["completion_tokens"]
            assert sum(details.values()) == len(ids)


@pytest.mark.long
@pytest.mark.parametrize(
    "value",
    [
        "text", 1, [], {}, {"type": "content"}, {"content": TEXT}, {"type": "text", "content": TEXT}, content(1),
        content([]), content([TEXT]), content([{"type": "text"}]), content([{"text": TEXT}]), content(None),
        content([{"type": "text", "text": 1}]), content([{"type": "refusal", "refusal": "no"}]),
        content([*TEXTS, {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}]),
    ],
    ids=str,
)  # fmt: skip
async def test_another_shape_is_a_400_that_names_it(value: Any, node: Node) -> None:
    status, answer, _ = await ask(node, prediction=value)
    assert (status, answer["error"]["param"]) == (400, "prediction"), answer
    assert answer["error"]["code"] in ("invalid_type", "missing_required_parameter")
    assert answer["error"]["message"].startswith(("prediction: ", "prediction."))
    assert node.engine.requests == []


async def test_members_that_are_not_known_are_named(node: Node) -> None:
    part = {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}, "id": None}
    status, _, ignored = await ask(node, prediction=content([part, part]) | {"strength": 1})
    assert (status, ignored) == (200, "prediction.content[].cache_control,prediction.strength")


NINES = "9" * 5000
HOSTILE = ["1e999", NINES, f"-{NINES}", '{"a": 1e400}', "[[1e400]]", '"\udcff"', '{"\udcff": 1}']


@pytest.mark.long
@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: value[:12].encode(errors="backslashreplace").decode())
@pytest.mark.parametrize("place", ["prediction", "prediction.content[]"])
async def test_what_is_ignored_is_not_read(value: str, place: str, node: Node) -> None:
    """Numbers that no float or decoder holds, and bytes that are no text (udcff stands for one)."""
    more = f', "x": {value}'
    in_part, beside = (more, "") if place.endswith("[]") else ("", more)
    raw = f'{{"type": "content", "content": [{{"type": "text", "text": "a"{in_part}}}]{beside}}}'
    assert await ask_raw(node, raw) == (200, f"{place}.x")


@pytest.mark.parametrize(
    "raw",
    [
        '{"type": "content", "content": "a", "\udcff": 1}',
        '{"type": "content", "content": [{"type": "text", "text": "a", "\udcff": 1}]}',
        f'{{"type": "content", "content": "a", "x": {"[" * 20_000}{"]" * 20_000}}}',
        json.dumps({"type": "content", "content": "a"} | {f"x{one}": 1 for one in range(300)}),
    ],
    ids=["name", "name of a part", "depth", "members"],
)  # fmt: skip
async def test_members_that_cannot_be_named_are_a_400(raw: str, node: Node) -> None:
    assert (await ask_raw(node, raw))[0] == 400
    assert node.engine.requests == []


async def ask_raw(node: Node, prediction: str) -> tuple[int, str | None]:
    head = f'{{"messages": {json.dumps(HI)}, "prediction": '
    body = (head + prediction + "}").encode(errors="surrogateescape")
    json_type = {"content-type": "application/json"}
    async with node.session.post(f"{node.url}{CHAT}", data=body, headers=json_type) as answer:
        return answer.status, answer.headers.get(IGNORED_HEADER)


@pytest.mark.parametrize("is_whole", [True, False])
def test_its_text_is_read_once(is_whole: bool) -> None:
    """What a second reading would hold: the event loop waits for it."""
    size = 1 << 20
    value = "x" * size if is_whole else [{"type": "text", "text": "x" * size, "y": 1}]
    raw = json.dumps({"messages": HI, "prediction": content(value)}).encode()
    decode_body(raw, ChatBody)
    tracemalloc.start()
    try:
        body, _ = decode_body(raw, ChatBody)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert body.prediction is not None
    assert size < held
    assert peak < 1.5 * size


async def test_it_is_bounded_before_any_work(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """By members, as the rest of the body; by characters and by tokens, as the context."""
    calls: list[str] = []
    encode = node.state.tokenizer._encode

    def noted(text: str, *more: Any) -> list[int]:
        calls.append(text)
        return encode(text, *more)

    monkeypatch.setattr(node.state.tokenizer, "_encode", noted)
    parts = [{"type": "text", "text": ""}] * (CHAT_BOUNDS.others.entries + 1)
    most = node.state.ready.max_model_len
    for value, code in ((parts, "invalid_value"), ("x" * (100 * most), "context_length_exceeded")):
        status, answer, _ = await ask(node, prediction=content(value))
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "prediction", code), answer
        assert "prediction" in answer["error"]["message"]
    assert calls == []
    status, answer, _ = await ask(node, prediction=content("x y" * most))
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "prediction", "context_length_exceeded")
    assert node.engine.requests == []


async def test_a_prefill_leg_checks_it_and_has_no_use_for_it(node: Node) -> None:
    """The answer is written, and counted, by the node that decodes."""
    leg: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    status, answer, _ = await ask(node, prediction=content(TEXT), **leg)
    assert status == 200, answer
    (request,) = node.engine.requests
    assert (request.work, request.prediction) == (Work.PREFILL, ())
    assert "completion_tokens_details" not in answer["usage"]
    for bad in (1, content("x" * (100 * node.state.ready.max_model_len))):
        status, answer, _ = await ask(node, prediction=bad, **leg)
        assert (status, answer["error"]["param"]) == (400, "prediction")
    assert len(node.engine.requests) == 1


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_other_apis_read_it_and_their_usage_has_no_place_for_it(path: str, node: Node, ids: list[int]) -> None:
    more: dict[str, Any] = {"max_tokens": 99} if path == MESSAGES else {"input": "hi"}
    body = (more if path == RESPONSES else {"messages": HI} | more) | {"prediction": content(TEXT)}
    async with node.session.post(f"{node.url}{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        assert "prediction" not in await answer.text()
        assert answer.headers.get(IGNORED_HEADER) is None
    assert node.engine.requests[0].prediction == tuple(ids)


@pytest.mark.long
async def test_a_stream_that_goes_on_at_another_node_counts_the_whole_answer() -> None:
    """Cut after each of its frames."""
    case, texts, end = next(one for one in SCRIPTED if str(one[0]) == "a prediction")
    async with Pair(texts, end=end) as pair:
        messages = await pair.first(case.path, case.body)
        usages = [Said.by(data_of(messages)).usage]
        for num in range(2, len(messages)):
            rest = await pair.second(case.path, continuing(case.body, continuation_of(messages[:num])))
            usages.append(Said.by(data_of(messages[:num]) + data_of(rest)).usage)
    assert len(usages) > 20
    details = {"reasoning_tokens": 0, "accepted_prediction_tokens": 51, "rejected_prediction_tokens": 19}
    assert [one["completion_tokens_details"] for one in usages] == [details] * len(usages)


async def test_completions_do_not_have_it(node: Node) -> None:
    async with node.session.post(f"{node.url}/v1/completions", json={"prompt": "hi", "prediction": 1}) as answer:
        assert (answer.status, answer.headers.get(IGNORED_HEADER)) == (200, "prediction")
    assert node.engine.requests[0].prediction == ()


async def test_special_tokens_in_it_are_text() -> None:
    tokenizer = demo_tokenizer()
    try:
        mark = tokenizer.text_of([2])
        assert await tokenizer.encode(mark, max_tokens=99) == [2], "the prompt's own are read"
        for text in (f"a {mark} b{mark}", mark, f"{mark[:4]}{mark}{mark[4:]}"):
            ids = await tokenizer.encode_answer(text, max_tokens=99, param="prediction")
            assert not any(map(tokenizer.is_special, ids))
            assert tokenizer.text_of(ids) == text
        plain = await tokenizer.encode_answer(TEXT, max_tokens=99, param="prediction")
        assert plain == await tokenizer.encode(TEXT, max_tokens=99, add_special_tokens=False)
        many = await tokenizer.encode_answer(mark * 1000, max_tokens=9999, param="prediction")
        assert not any(map(tokenizer.is_special, many))
        assert tokenizer.text_of(many).startswith(mark * 63)
    finally:
        tokenizer.close()


def test_a_router_passes_it_on_and_its_bytes_are_none_of_the_prompt() -> None:
    raw = b'{"messages": [{"role": "user", "content": "hi"}], "prediction": {"type": "content", "content": "%s"}}'
    short, long = (RequestBody(raw % text) for text in (b"a", b"a" * 10_000))
    assert short.prompt_bytes == long.prompt_bytes == short.num_bytes - len(b'{"type": "content", "content": "a"}')
    assert short.text_chain(b"k" * 32) == long.text_chain(b"k" * 32)
    for sent in (long.plain(), long.for_prefill(), long.with_transfer({"continuation": {}})):
        assert b'"prediction":{"type": "content", "content": "aaaa' in sent
