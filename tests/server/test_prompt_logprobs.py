"""Log-probabilities of prompts in the answers of a node over a real engine, beside transformers'."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from pd_cluster.protocol.messages import Work
from pd_cluster.server.app import create_app
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.engine.test_core_pipeline import CONFIG, make_connector
from tests.in_loop_engine import InLoopEngine
from tests.server.live_server import make_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from pd_cluster.server.text.tokenizer import Tokenizer
    from pd_connectors.base import Connector

pytestmark = [pytest.mark.anyio, pytest.mark.long]
CONFIGURED = replace(
    CONFIG,
    cache=replace(CONFIG.cache, num_blocks=60),
    scheduler=replace(CONFIG.scheduler, max_num_seqs=8, max_num_batched_tokens=64),
)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hello there, how are you?"}]
Logprobs = "Callable[[list[int]], torch.Tensor]"


@pytest.fixture(scope="module")
def engine_parts() -> Iterator[tuple[DeviceExecutor, Connector]]:
    executor = DeviceExecutor.started(CONFIGURED, lambda text: None)
    for connector in make_connector(executor):
        yield executor, connector
    executor.close()


@pytest.fixture(scope="module")
def expected() -> Callable[[list[int]], torch.Tensor]:
    """transformers' log-softmax of a prompt, [T, V]."""
    model = AutoModelForCausalLM.from_pretrained(CONFIG.model.model, dtype=torch.float32)

    def compute(prompt: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
            return logits.log_softmax(-1)

    return compute


class Node:
    """A node's app over an engine in the loop."""

    def __init__(self, client: httpx.AsyncClient, engine: InLoopEngine, tokenizer: Tokenizer) -> None:
        self._client = client
        self.engine = engine
        self.text_of = tokenizer.text_of
        self.encode = partial(tokenizer.encode, max_tokens=4096)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The status, and the answer: of a stream its chunks."""
        answer = await self._client.post(path, json=body)
        if not body.get("stream") or answer.status_code != 200:
            return answer.status_code, answer.json()
        lines = answer.text.splitlines()
        return answer.status_code, [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.fixture
async def node(engine_parts: tuple[DeviceExecutor, Connector]) -> AsyncIterator[Node]:
    executor, connector = engine_parts
    engine = InLoopEngine(CONFIGURED, executor, connector)
    state = make_state(engine)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(create_app(state))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(state.grammar_checks.close)
        stack.callback(state.tokenizer.close)
        running = asyncio.create_task(engine.run())
        stack.callback(running.cancel)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://node"))
        yield Node(client, engine, state.tokenizer)
        await engine.rest()


def ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(5, 3000, (length,), generator=generator).tolist()
    return drawn


async def test_what_lm_eval_sends(node: Node, expected: Callable[[list[int]], torch.Tensor]) -> None:
    """lm-eval 0.4's loglikelihoods: contexts and continuations as token ids, several in a request."""
    contexts, ends = [ids(n, n) for n in (1, 30, 90)], [ids(n, n + 99) for n in (5, 1, 20)]
    prompts = [context + end for context, end in zip(contexts, ends, strict=True)]
    prompts.append([*prompts[1][:-1], int(expected(prompts[1])[-2].argmax())])  # a greedy one
    contexts, ends = [*contexts, contexts[1]], [*ends, prompts[-1][30:]]
    body = {
        "model": "demo", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
        "echo": True,
    }  # fmt: skip
    for _ in ("cold", "warm"):
        status, answer = await node.post(COMPLETIONS, body)
        assert status == 200, answer
        for choice, context, end, prompt in zip(answer["choices"], contexts, ends, prompts, strict=True):
            found, rows = choice["logprobs"], expected(prompt)
            assert found["token_logprobs"][0] is None
            assert found["top_logprobs"][0] is None
            assert len({len(values) for values in found.values()} | {len(prompt) + 1}) == 1
            own = rows[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
            first = len(context)
            assert sum(found["token_logprobs"][first:-1]) == pytest.approx(float(own[first - 1 :].sum()), abs=1e-4)
            assert found["token_logprobs"][1:-1] == pytest.approx(own.tolist(), abs=1e-4)
            pairs = zip(found["token_logprobs"][first:-1], found["top_logprobs"][first:-1], strict=True)
            is_greedy = all(value == max(top.values()) for value, top in pairs)
            assert is_greedy == bool((rows[first - 1 : -1].argmax(-1) == torch.tensor(end)).all())
            assert choice["text"].startswith(node.text_of(prompt))
            assert found["text_offset"][0] == 0
            assert found["text_offset"] == sorted(found["text_offset"])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert {request.work for request in node.engine.requests} == {Work.GENERATE}


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_generated_for_max_tokens_0(
    node: Node, expected: Callable[[list[int]], torch.Tensor], stream: bool
) -> None:
    prompt = ids(70, 4)
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 2, "prompt_logprobs": 0, "stream": stream}
    status, answer = await node.post(COMPLETIONS, body)
    assert status == 200, answer
    chunks = answer if stream else [answer]
    choice = chunks[0]["choices"][0]
    assert choice["text"] == node.text_of(prompt)
    own = expected(prompt)[torch.arange(69), torch.tensor(prompt[1:])].tolist()
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
    assert all(len(top) in (2, 3) for top in choice["logprobs"]["top_logprobs"][1:])
    assert choice["prompt_logprobs"][0] is None
    told = [
        entry[str(token)]["logprob"] for entry, token in zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
    ]
    assert told == pytest.approx(own, abs=1e-4)
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1] * 69
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    if not stream:
        assert answer["usage"]["completion_tokens"] == 0
    assert node.engine.requests[0].work is Work.READ
    status, answer = await node.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 0, "echo": True})
    assert (status, answer["choices"][0]["text"]) == (200, node.text_of(prompt))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_text_offsets_are_positions_in_the_text(node: Node, as_ids: bool, stream: bool) -> None:
    """After characters of several tokens, of an echoed text or of ids with a special token, which is not shown."""
    text = "Hi 😀 é end"
    given = await node.encode(text)
    prompt: Any = [0, *given, 0, *given] if as_ids else text
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 0, "stream": stream}
    status, answer = await node.post(COMPLETIONS, body | {"ignore_eos": True, "return_token_ids": True})
    assert status == 200, answer
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk["choices"]]
    said = "".join(choice["text"] for choice in choices)
    assert said.startswith(text + text if as_ids else text)
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    offsets = [offset for one in told for offset in one["text_offset"]]
    names = [name for one in told for name in one["tokens"]]
    shown = list(zip(names, offsets, strict=True))[: len(prompt) if as_ids else len(given)]
    assert offsets == sorted(offsets)
    for name, offset in shown:
        assert name.startswith(("bytes:", "<|")) or said[offset:].startswith(name), (name, offset)
    parts = [offset for name, offset in shown if name.startswith("bytes:")]
    assert set(parts) == {at for at, char in enumerate(said[: len(text) * (1 + as_ids)]) if char in "😀é"} - {
        at for at, char in enumerate(said) if char == "é" and "é" in names
    }
    assert offsets[len(shown)] == len(text) * (1 + as_ids), "the first token of the output"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_prompt_logprobs_beside_an_answer(
    node: Node, expected: Callable[[list[int]], torch.Tensor], path: str, stream: bool
) -> None:
    """vLLM's shape: in each choice of a completion, in the body of a chat answer; in a stream with the first chunk."""
    prompts: dict[str, Any] = {COMPLETIONS: {"prompt": ids(50, 5)}, CHAT: {"messages": HI}}
    body = prompts[path] | {
        "prompt_logprobs": 3, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": stream,
        "return_token_ids": True,
    }  # fmt: skip
    status, answer = await node.post(path, body)
    assert status == 200, answer
    chunks = answer if stream else [answer]
    places = chunks if path == CHAT else [choice for chunk in chunks for choice in chunk["choices"]]
    assert ["prompt_logprobs" in place for place in places] == [True] + [False] * (len(places) - 1)
    prompt, told = places[0]["prompt_token_ids"], places[0]["prompt_logprobs"]
    rows = expected(prompt)
    assert (len(told), told[0]) == (len(prompt), None)
    for row, token_id, entry in zip(rows, prompt[1:], told[1:], strict=False):
        assert next(iter(entry)) == str(token_id)
        assert entry[str(token_id)]["logprob"] == pytest.approx(float(row[token_id]), abs=1e-4)
        assert entry[str(token_id)]["decoded_token"] == node.text_of([token_id])
        best = [one["logprob"] for one in sorted(entry.values(), key=lambda one: one["rank"])][:3]
        assert best == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    generated = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]
    assert len(generated) == 6


async def test_several_choices_show_the_prompt_each(node: Node) -> None:
    body = {"prompt": ids(20, 6), "n": 2, "max_tokens": 3, "echo": True, "logprobs": 1, "ignore_eos": True, "seed": 3}
    _, whole = await node.post(COMPLETIONS, body)
    _, chunks = await node.post(COMPLETIONS, body | {"stream": True})
    for index, choice in enumerate(whole["choices"]):
        parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        for name, values in choice["logprobs"].items():
            streamed = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
            assert len(values) == 23
            if name == "token_logprobs":
                assert streamed[1:] == pytest.approx(values[1:], abs=1e-4)
            elif name != "top_logprobs":
                assert streamed == values
        assert "".join(part["text"] for part in parts) == choice["text"]
    assert (
        whole["choices"][0]["logprobs"]["token_logprobs"][:20] == whole["choices"][1]["logprobs"]["token_logprobs"][:20]
    )


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0, "echo": True, "n": 2}, "n"),
        (COMPLETIONS, {"prompt": [[7] * 500] * 2, "n": 128, "prompt_logprobs": 20}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": [[7] * 500] * 2, "n": 128, "echo": True, "logprobs": 20}, "logprobs"),
        (CHAT, {"messages": HI, "prompt_logprobs": 21}, "prompt_logprobs"),
        (CHAT, {"messages": HI, "prompt_logprobs": 1, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HI, "prompt_logprobs": True}, "prompt_logprobs"),
    ],
)
async def test_refusals(node: Node, path: str, body: dict[str, Any], field: str) -> None:
    status, answer = await node.post(path, body)
    assert (status, answer["error"]["param"]) == (400, field), answer
    assert node.engine.requests == []
    await node.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})  # the engine rests after it


async def test_a_decode_leg_reads_the_prompt_itself(node: Node) -> None:
    """A ticket brings KV and no log-probabilities."""
    params = {"do_remote_prefill": True, "ticket": "x", "prompt_token_ids": [5, 6]}
    body = {"prompt": ids(20, 6), "prompt_logprobs": 1, "max_tokens": 2, "kv_transfer_params": params}
    status, answer = await node.post(COMPLETIONS, body)
    assert (status, len(answer["choices"][0]["prompt_logprobs"])) == (200, 20)
    assert node.engine.requests[0].work is Work.GENERATE


async def test_facts_of_the_tokenizer(node: Node) -> None:
    answer = (await node._client.get("/tokenizer_info")).json()
    settings = json.loads((Path(CONFIG.model.model) / "tokenizer_config.json").read_text())
    assert answer["eos_token"] == settings["eos_token"]
    assert answer["bos_token"] is None
    assert "<|im_start|>" in answer["chat_template"]
    assert answer["model_max_length"] == 512
    status, tokens = await node.post("/tokenize", {"prompt": answer["eos_token"], "add_special_tokens": False})
    assert (status, tokens["tokens"]) == (200, [2])
    await node.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
