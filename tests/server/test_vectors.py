"""Vectors and scores of real engines beside transformers', by clients of others, at a node and through the router."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import openai
import pytest
import torch

from pd_cluster.server.routes.rerank import INSTRUCTION, QUESTION
from tests.router.router_process import serving
from tests.server.tiny_readers import HIDDEN_SIZE, TinyReader, reader_config, reader_node, save_reader

if TYPE_CHECKING:
    from tests.server.tiny_readers import ReaderNode

pytestmark = [pytest.mark.anyio, pytest.mark.long]
ABS = 1e-4
LONG = "Once upon a time there was a small town by the sea. " * 12  # several blocks, and of several chunks
TEXTS = ["Hello", " there, where are you?", LONG, LONG + "The end.", "Où est 🙂?"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> TinyReader:
    return save_reader(tmp_path_factory.mktemp("embedder"), is_embedder=True)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> TinyReader:
    return save_reader(tmp_path_factory.mktemp("reranker"), is_embedder=False)


def expected(embedder: TinyReader, text: str) -> list[float]:
    vector = torch.nn.functional.normalize(embedder.vector(embedder.tokenizer(text)["input_ids"]), dim=0)
    found: list[float] = vector.tolist()
    return found


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def post(url: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == status, answer
        return answer


async def check_vectors(embedder: TinyReader, url: str) -> None:
    """Float and base64, which the client asks for by itself."""
    async with client(url) as ai:
        for more in ({"encoding_format": "float"}, {}):
            answer = await ai.embeddings.create(model="demo", input=TEXTS, **more)
            assert [one.index for one in answer.data] == list(range(len(TEXTS)))
            for one, text in zip(answer.data, TEXTS, strict=True):
                assert one.embedding == pytest.approx(expected(embedder, text), abs=ABS)
            num_tokens = sum(len(embedder.tokenizer(text)["input_ids"]) for text in TEXTS)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens


async def test_vectors_equal_transformers(embedder: TinyReader) -> None:
    async with reader_node(reader_config(embedder.directory)) as node:
        assert (node.state.task.name, node.state.task.hidden_size) == ("embed", HIDDEN_SIZE)
        await check_vectors(embedder, node.url)
        ids = [embedder.tokenizer(text)["input_ids"] for text in TEXTS]
        url = f"{node.url}/v1/embeddings"
        for given, texts in ((ids, TEXTS), (ids[0], TEXTS[:1]), (TEXTS[1], TEXTS[1:2])):
            answer = await post(url, {"input": given})
            for one, text in zip(answer["data"], texts, strict=True):
                assert one["embedding"] == pytest.approx(expected(embedder, text), abs=ABS)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        again = await post(url, {"input": LONG})
        assert (cached, again["usage"]["prompt_tokens_details"]["cached_tokens"] > 64) == (0, True), "its blocks stay"
        salted = await post(url, {"input": LONG, "cache_salt": "other"})
        assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        short = (await post(url, {"input": "Hello", "dimensions": 7}))["data"][0]["embedding"]
        cut = np.array(expected(embedder, "Hello")[:7])
        assert short == pytest.approx((cut / np.linalg.norm(cut)).tolist(), abs=ABS)
        raw = (await post(f"{node.url}/pooling", {"input": "Hello", "normalize": False}))["data"][0]["data"]
        assert raw == pytest.approx(embedder.vector(embedder.tokenizer("Hello")["input_ids"]).tolist(), abs=ABS)
        await node.engine.rest()
        groups = {request.group for request in node.engine.requests[: 2 * len(TEXTS)]}
        assert len(groups) == 2, "the inputs of a request share turns"


async def test_through_the_router_only_p_works(embedder: TinyReader) -> None:
    async with (
        reader_node(reader_config(embedder.directory, "prefill")) as p,
        reader_node(reader_config(embedder.directory, "decode")) as d,
        serving([p], [d]) as router,
    ):
        await check_vectors(embedder, router.url)
        assert (len(p.engine.requests), d.engine.requests) == (2 * len(TEXTS), [])
        await router.idle()
        async with client(router.url) as ai:
            with pytest.raises(openai.BadRequestError, match="--task generate"):
                await ai.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hi"}])
        answer = await post(f"{router.url}/v1/embeddings", {"input": ["Hello"] * 512})
        assert len(answer["data"]) == 512
        assert answer["data"][511]["embedding"] == pytest.approx(expected(embedder, "Hello"), abs=ABS)
        await leave_early(p, router.url)
        await router.idle()


async def leave_early(p: ReaderNode, url: str) -> None:
    """Of a client that leaves while its first inputs are read, the others are never given to the engine."""
    before = len(p.engine.requests)
    inputs = [f"{number} {LONG}" for number in range(300)]
    request = asyncio.create_task(post(f"{url}/v1/embeddings", {"input": inputs}))
    while len(p.engine.requests) == before:  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0.001)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    while p.state.num_in_flight:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await p.engine.rest()
    assert len(p.engine.requests) - before < 300
    assert (p.state.read_window.num_tokens, p.state.read_window.num_waiting) == (0, 0)


QUERY = "Where is the town?"
DOCUMENTS = ["By the sea.", LONG, "In the hills; it is small.", "yes"]


def probability(reranker: TinyReader, document: str, instruction: str = INSTRUCTION) -> float:
    text = QUESTION.format(instruction=instruction, query=QUERY, document=document)
    logits = reranker.logits(reranker.tokenizer.encode(text, add_special_tokens=False))
    yes, no = (reranker.tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    return float(torch.softmax(logits[[no, yes]], dim=0)[1])


async def test_scores_equal_transformers(reranker: TinyReader) -> None:
    async with (
        reader_node(reader_config(reranker.directory, task="score")) as node,
        serving(None, None, [node]) as router,
    ):
        scores = [probability(reranker, one) for one in DOCUMENTS]
        for url in (node.url, router.url):
            answer = await post(f"{url}/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
            assert [one["score"] for one in answer["data"]] == pytest.approx(scores, abs=ABS)
            pairs = await post(f"{url}/score", {"queries": [QUERY] * 4, "documents": DOCUMENTS})
            assert [one["score"] for one in pairs["data"]] == pytest.approx(scores, abs=ABS)
            ranking = await post(f"{url}/v2/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 3})
            found = [one["index"] for one in ranking["results"]]
            assert found == sorted(range(4), key=lambda index: -scores[index])[:3]
            assert [one["relevance_score"] for one in ranking["results"]] == pytest.approx(
                [scores[index] for index in found], abs=ABS
            )
            assert [one["document"]["text"] for one in ranking["results"]] == [DOCUMENTS[index] for index in found]
        other = await post(f"{node.url}/v1/score", {"text_1": QUERY, "text_2": "By the sea.", "instruction": "Any."})
        assert other["data"][0]["score"] == pytest.approx(probability(reranker, "By the sea.", "Any."), abs=ABS)
        assert other["data"][0]["score"] != pytest.approx(scores[0], abs=ABS)
        assert ranking["usage"]["prompt_tokens_details"]["cached_tokens"] > 4 * 48, "the question's first blocks"
