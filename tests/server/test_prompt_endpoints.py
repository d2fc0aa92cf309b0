"""Requests about prompts alone against a scripted engine: bodies, answers, refusals, and how inputs enter it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import string
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.models.model_task import ModelTask
from pd_cluster.protocol.messages import Abort, PromptRead, RequestFailed, Timeline, Work
from pd_cluster.protocol.prompt_outputs import PromptOutputs
from pd_cluster.server.node.read_window import WINDOW_TOKENS, ReadWindow
from pd_cluster.server.requests.prompt_bodies import MAX_INPUTS
from pd_cluster.server.text.chat_template import ChatTemplate
from pd_http.endpoints import Kind, paths_of
from tests.deadlines import HANG_S
from tests.server.fake_engine import FakeEngine, Line, says
from tests.server.live_server import Node, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from hypothesis.strategies import SearchStrategy

pytestmark = pytest.mark.anyio
EMBEDDINGS = "/v1/embeddings"
SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
PROMPT_PATHS = paths_of(Kind.READ)
YES, NO = 71, 72
TASKS = {"generate": ModelTask(), "embed": ModelTask("embed", 3), "score": ModelTask("score", 3, yes_id=YES, no_id=NO)}
BODIES: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {"input": "hi"},
    "/pooling": {"input": "hi"},
    **{path: {"text_1": "q", "text_2": ["a", "b"]} for path in SCORE_PATHS},
    **{path: {"query": "q", "documents": ["a", {"text": "b"}]} for path in RERANK_PATHS},
}


def task_of(path: str) -> str:
    return "embed" if path in (EMBEDDINGS, "/pooling") else "score"


async def reads(line: Line) -> None:
    """The vector is (first token, number of tokens, 0), the logit of "yes" 0.1 for each token, that of "no" 0."""
    ids, outputs = line.request.prompt_token_ids, line.request.outputs
    assert outputs is not None
    assert (line.request.work, line.request.sampling.n) == (Work.READ, 1)
    pooled = np.array([ids[0], len(ids), 0], "<f4").tobytes() if outputs.pooled else b""
    logits = tuple(0.1 * len(ids) if one == YES else 0.0 for one in outputs.logits_of)
    line.push(PromptRead(line.request.request_id, pooled, logits, 1, Timeline(queue_s=0.001, prefill_s=0.002)))


@contextlib.asynccontextmanager
async def node_of(task: str, script: Any = reads, **engine: Any) -> AsyncIterator[Node]:
    async with running(FakeEngine(script, **engine)) as node:
        node.state.task = TASKS[task]
        yield node


async def post(node: Node, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with node.session.post(node.url + path, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        assert response.headers["x-pd-prefill"] == node.state.node_id
        assert "x-pd-decode" not in response.headers
        return answer


async def refused(node: Node, path: str, body: Any) -> dict[str, Any]:
    async with node.session.post(node.url + path, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 400, answer
        return dict(answer["error"])


async def test_embeddings_in_both_encodings() -> None:
    async with node_of("embed") as node:
        whole = await post(node, EMBEDDINGS, {"input": [[3], [4, 9, 9]], "request_id": "mine", "user": "me"})
        encoded = await post(node, EMBEDDINGS, {"input": [4, 9, 9], "encoding_format": "base64"})
        raw = await post(node, EMBEDDINGS, {"input": [4, 9, 9], "normalize": False, "dimensions": 2})
        pooled = await post(node, "/pooling", {"input": [4, 9, 9]})
        metrics = {name: node.metric(f'pd_{name}_total{{work="read"}}') for name in ("prompt_tokens", "cached_tokens")}
        assert node.metric('pd_requests_total{endpoint="embeddings",outcome="ok"}') == 3
    assert {name: whole[name] for name in ("id", "object", "model")} == {
        "id": "embd-mine", "object": "list", "model": "demo"
    }  # fmt: skip
    assert [(one["object"], one["index"]) for one in whole["data"]] == [("embedding", 0), ("embedding", 1)]
    vector = np.array([4, 3, 0]) / 5
    assert whole["data"][1]["embedding"] == pytest.approx(vector, abs=1e-7)
    assert np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f4") == pytest.approx(vector, abs=1e-7)
    assert raw["data"][0]["embedding"] == [4.0, 3.0]
    assert (pooled["data"][0]["object"], pooled["data"][0]["data"]) == ("pooling", pytest.approx(vector, abs=1e-7))
    assert whole["usage"] == {
        "prompt_tokens": 4, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}
    }  # fmt: skip
    assert metrics == {"prompt_tokens": 13, "cached_tokens": 5}


@pytest.mark.parametrize("path", SCORE_PATHS)
async def test_scores(path: str) -> None:
    async with node_of("score") as node:
        answer = await post(node, path, {"text_1": "q", "text_2": ["a", "a b c"]})
        one = await post(node, path, {"queries": ["q"], "documents": "a"})
        lengths = [len(request.prompt_token_ids) for request in node.engine.requests]
        assert node.engine.requests[0].outputs == PromptOutputs(logits_of=(YES, NO))
        node.state.task = ModelTask("score", yes_id=YES)
        alone = await post(node, path, {"queries": "q", "documents": "a"})
        assert node.engine.requests[-1].outputs == PromptOutputs(logits_of=(YES,))
    expected = [1 / (1 + np.exp(-0.1 * length)) for length in lengths]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected[:2])
    assert [one["data"][0]["score"], alone["data"][0]["score"]] == pytest.approx([expected[2]] * 2)
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("score", 0), ("score", 1)]
    assert answer["usage"]["prompt_tokens"] == sum(lengths[:2])


@pytest.mark.parametrize("path", RERANK_PATHS)
async def test_reranks(path: str) -> None:
    documents: list[Any] = ["a", {"text": "a b c d"}, "a b", "a"]
    async with node_of("score") as node:
        whole = await post(node, path, {"query": "q", "documents": documents})
        best = await post(node, path, {"query": "q", "documents": documents, "top_n": 1, "return_documents": False})
        all_of_them = await post(node, path, {"query": "q", "documents": documents, "top_n": 99})
    assert [one["index"] for one in whole["results"]] == [1, 2, 0, 3], "equal scores keep their order"
    assert whole["results"][0]["document"] == {"text": "a b c d"}
    assert best["results"] == [{"index": 1, "relevance_score": whole["results"][0]["relevance_score"]}]
    assert all_of_them["results"] == whole["results"]
    assert whole["model"] == "demo"


async def test_a_template_of_the_model_s_own_asks_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{# 'query' 'document' #}"
    async with node_of("score") as node:
        hugging_face = node.state.tokenizer._tokenizer
        monkeypatch.setattr(hugging_face, "chat_template", template)
        monkeypatch.setattr(node.state.tokenizer, "chat_template", ChatTemplate(hugging_face))
        await post(node, "/score", {"text_1": "q", "text_2": "d"})
        await post(node, "/score", {"text_1": "q", "text_2": "d", "instruction": "i"})
        texts = [hugging_face.decode(request.prompt_token_ids) for request in node.engine.requests]
    assert texts == ["[query]q[document]d", "[system]i[query]q[document]d"]


@pytest.mark.long
@pytest.mark.parametrize("path", PROMPT_PATHS)
async def test_another_task_is_refused_by_name(path: str) -> None:
    for task in TASKS:
        async with node_of(task) as node:
            if task == task_of(path):
                await post(node, path, BODIES[path])
                continue
            error = await refused(node, path, BODIES[path])
            assert error["code"] == "unsupported_task"
            assert f"--task {task_of(path)}" in error["message"]
            assert f"--task {task};" in error["message"]
            assert node.engine.requests == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_node_of_vectors_generates_nothing(path: str) -> None:
    async with node_of("embed", says([5])) as node:
        body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
        assert (await refused(node, path, body))["code"] == "unsupported_task"
        async with node.session.get(f"{node.url}/get_model_info") as response:
            assert (await response.json())["is_generation"] is False
        async with node.session.post(f"{node.url}/v1/embedding", json={}) as response:
            assert response.status == 404


INPUTS: list[dict[str, Any]] = [
    {}, {"input": ""}, {"input": []}, {"input": ["a", ""]}, {"input": [[]]}, {"input": [1.5]}, {"input": [-1]},
    {"input": [3072]}, {"input": None}, {"input": {"a": 1}}, {"input": [[1], "a"]},
    {"input": ["a"] * (MAX_INPUTS + 1)}, {"input": [1] * 4096}, {"input": "hello " * 5000},
]  # fmt: skip
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *((EMBEDDINGS, body, "input") for body in INPUTS),
    (EMBEDDINGS, {"input": "a", "encoding_format": "bytes"}, "encoding_format"),
    (EMBEDDINGS, {"input": "a", "encoding_format": 1}, "encoding_format"),
    (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions"),
    (EMBEDDINGS, {"input": "a", "dimensions": 4}, "dimensions"),
    (EMBEDDINGS, {"input": "a", "dimensions": "2"}, "dimensions"),
    (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (EMBEDDINGS, {"input": "a", "priority": 1 << 40}, "priority"),
    (EMBEDDINGS, {"input": "a", "request_id": "\n"}, "request_id"),
    (EMBEDDINGS, {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ("/score", {"text_1": "a " * 3000, "text_2": ["a"] * MAX_INPUTS}, "documents"),  # 12 million tokens
    ("/score", {"text_1": "a", "text_2": ["a"] * MAX_INPUTS, "instruction": "a " * 3000}, "documents"),
    ("/score", {"text_2": "a"}, "text_1"),
    ("/score", {"text_1": "a"}, "text_2"),
    ("/score", {"text_1": "a", "queries": "a", "text_2": "a"}, "text_1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "documents"),
    ("/score", {"text_1": ["a", "b"], "text_2": "a"}, "documents"),
    ("/score", {"text_1": "", "text_2": "a"}, "documents"),
    ("/score", {"text_1": "a", "text_2": ["a"] * (MAX_INPUTS + 1)}, "documents"),
    ("/score", {"text_1": "a", "text_2": [1]}, "text_2"),
    ("/score", {"text_1": "a", "text_2": "a", "use_activation": False}, "use_activation"),
    ("/score", {"text_1": "a", "text_2": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ("/rerank", {"query": "a"}, "documents"),
    ("/rerank", {"documents": ["a"]}, "query"),
    ("/rerank", {"query": "a", "documents": []}, "documents"),
    ("/rerank", {"query": "a", "documents": [{"title": "a"}]}, "documents"),
    ("/rerank", {"query": "a", "documents": [{"text": "a", "title": "b"}]}, "documents"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
    ("/rerank", {"query": "a", "documents": ["a " * 4000]}, "documents"),
]  # fmt: skip


@pytest.mark.long
async def test_what_is_wrong_is_refused_by_name_before_the_engine_gets_anything() -> None:
    for task in ("embed", "score"):
        async with node_of(task) as node:
            for path, body, param in WRONG:
                if task_of(path) == task:
                    error = await refused(node, path, body)
                    assert error["param"] == param, (body, error)
            async with node.session.post(node.url + "/rerank", json=BODIES["/rerank"] | {"model": "x"}) as response:
                assert response.status == 404
            node.state.draining = True
            async with node.session.post(node.url + EMBEDDINGS, json={"input": "a"}) as response:
                assert response.status == 503
            assert node.engine.requests == []


async def test_ignored_fields_are_named() -> None:
    async with node_of("embed") as node:
        body = {"input": "a", "user": "me", "what": 1}
        async with node.session.post(node.url + EMBEDDINGS, json=body) as response:
            assert (response.status, response.headers["x-pd-ignored"]) == (200, "user,what")


JSON: SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5000) | st.text(string.printable, max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["text", "a"]), inner, max_size=2),
    max_leaves=6,
)
NAMES = [
    "input", "encoding_format", "dimensions", "normalize", "text_1", "text_2", "queries", "query", "documents", "top_n",
    "return_documents", "instruction", "truncate_prompt_tokens", "priority", "cache_salt", "add_special_tokens",
]  # fmt: skip


@pytest.mark.long
async def test_no_body_breaks_a_node() -> None:
    bodies = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6)
    found: list[tuple[str, dict[str, Any]]] = []

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.sampled_from(PROMPT_PATHS), bodies, st.booleans())
    def draw(path: str, body: dict[str, Any], is_whole: bool) -> None:
        found.append((path, (BODIES[path] | body) if is_whole else body))

    draw()
    statuses = set()
    async with node_of("embed") as node:
        for path, body in found:
            node.state.task = TASKS[task_of(path)]
            async with node.session.post(node.url + path, json=body) as response:
                answer = await response.json()
                statuses.add(response.status)
                assert response.status in (200, 400), (body, answer)
                assert ("error" in answer) == (response.status == 400)
        assert node.state.read_window.num_tokens == 0
    assert statuses == {200, 400}


# --- how inputs enter the engine


@pytest.mark.long
async def test_inputs_enter_a_few_at_a_time_as_one_group() -> None:
    num_open = most = 0

    async def script(line: Line) -> None:
        nonlocal num_open, most
        num_open += len(line.request.prompt_token_ids)
        most = max(most, num_open)
        for _ in range(3):
            await asyncio.sleep(0)
        num_open -= len(line.request.prompt_token_ids)
        await reads(line)

    async with node_of("embed", script) as node:
        inputs = [[number % 7] * (1 + number % 90) for number in range(400)]
        both = await asyncio.gather(
            post(node, EMBEDDINGS, {"input": inputs}), post(node, EMBEDDINGS, {"input": [[5] * 3000]})
        )
        groups = [request.group for request in node.engine.requests]
        alone = [len(request.prompt_token_ids) for request in node.engine.requests].index(3000)
    assert [one["embedding"][1] > 0 for one in both[0]["data"]] == [True] * 400
    assert most <= WINDOW_TOKENS
    assert len(set(groups)) == 2
    assert alone < 300, "HTTP requests take turns"


async def test_one_input_that_fails_fails_the_request_and_aborts_the_others() -> None:
    async def script(line: Line) -> None:
        if line.request.prompt_token_ids == [9]:
            line.push(RequestFailed(line.request.request_id, "Overloaded", "no room"))
        else:
            assert isinstance(await line.heard(), Abort)

    async with node_of("embed", script) as node:
        async with node.session.post(node.url + EMBEDDINGS, json={"input": [[1], [2], [9]]}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "overloaded")
            assert response.headers["retry-after"] == "1"
        aborted = {node.engine.aborts.get_nowait().request_id for _ in range(2)}
        assert aborted == {request.request_id for request in node.engine.requests[:2]}
        assert node.state.read_window.num_tokens == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("task", "path", "body", "named"),
    [
        ("embed", EMBEDDINGS, {"input": [[3], [66], [4]]}, "input[1]"),
        ("embed", EMBEDDINGS, {"input": [[3], [66]], "encoding_format": "base64"}, "input[1]"),
        ("embed", "/pooling", {"input": [66], "normalize": False}, "input[0]"),
        ("score", SCORE_PATHS[0], {"text_1": "q", "text_2": ["a", "a b c d e f " * 99]}, "documents[1]"),
    ],
    ids=["float", "base64", "pooling", "score"],
)
async def test_what_is_no_number_is_an_error_that_names_the_input(
    task: str, path: str, body: dict[str, Any], named: str, value: float
) -> None:
    """JSON would have null in its place. The model fails at token 66 and at long prompts."""

    async def reads_badly(line: Line) -> None:
        ids, outputs = line.request.prompt_token_ids, line.request.outputs
        assert outputs is not None
        is_bad = ids == [66] or len(ids) > 400
        pooled = np.array([1, value if is_bad else 2, 3], "<f4").tobytes() if outputs.pooled else b""
        logits = tuple(value if is_bad and one == YES else 0.0 for one in outputs.logits_of)
        line.push(PromptRead(line.request.request_id, pooled, logits, 0, None))

    async with node_of(task, reads_badly) as node, node.session.post(node.url + path, json=body) as response:
        answer = await response.json()
    assert (response.status, answer["error"]["code"]) == (500, "not_finite")
    assert f"{named} is not finite" in answer["error"]["message"]


async def test_a_client_that_leaves_takes_its_inputs_back() -> None:
    async def script(line: Line) -> None:
        await line.heard()

    async with node_of("embed", script) as node:
        body = {"input": [[1] * 2000] * 10}
        calls = [asyncio.create_task(post(node, EMBEDDINGS, body)) for _ in range(3)]
        async with asyncio.timeout(HANG_S):
            while len(node.engine.requests) < 2 or node.state.read_window.num_waiting < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            while node.state.num_in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert len(node.engine.requests) == 2
        assert (node.state.read_window.num_tokens, node.state.read_window.num_waiting) == (0, 0)


async def test_too_many_requests_that_wait_are_refused() -> None:
    async with node_of("embed") as node:
        node.state.read_window.num_waiting = node.state.config.scheduler.max_waiting
        async with node.session.post(node.url + EMBEDDINGS, json={"input": "a"}) as response:
            assert response.status == 503
        assert node.engine.requests == []


@pytest.mark.long
async def test_short_inputs_never_overflow_the_engine_s_queue() -> None:
    most = 0

    async def script(line: Line) -> None:
        nonlocal most
        most = max(most, len(line.engine._tasks) - sum(task.done() for task in line.engine._tasks.values()))
        await asyncio.sleep(0)
        await reads(line)

    async with node_of("embed", script) as node:
        whole = await post(node, EMBEDDINGS, {"input": [[1]] * MAX_INPUTS, "encoding_format": "base64"})
    assert (len(whole["data"]), 0 < most <= 256) == (MAX_INPUTS, True)


async def test_the_window_serves_in_order_and_survives_cancellation() -> None:
    window = ReadWindow(3, 10)
    order: list[int] = []

    async def take(number: int, num_tokens: int) -> None:
        await window.take(num_tokens)
        order.append(number)

    tasks = [asyncio.create_task(take(number, size)) for number, size in enumerate((6, 5, 1, 30, 2))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == [0], "the second has no room, and none passes it"
    tasks[1].cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == [0, 2]
    window.give(6)
    window.give(1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == [0, 2, 3], "more than the window, alone"
    window.give(30)
    await tasks[4]
    assert order == [0, 2, 3, 4]
    assert window.num_waiting == 0
