"""Beam searches against a scripted engine: what it is asked for, and the forms of the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_cluster.protocol.messages import FinishReason, SequenceTokens, TokensOut
from pd_cluster.protocol.sampling_params import BeamParams
from pd_connectors.protocol.messages import SampledToken
from tests.server.fake_engine import FakeEngine, Line, says
from tests.server.live_server import running
from tests.server.sse import post_events

if TYPE_CHECKING:
    from tests.server.live_server import Node

pytestmark = pytest.mark.anyio

SEARCH: dict[str, Any] = {"prompt": "hi", "max_tokens": 3, "use_beam_search": True, "n": 2}


async def answers(line: Line) -> None:
    """Both answers at once, as the engine ends a search."""
    tokens = [tuple(map(SampledToken, ids)) for ids in ((5, 6, 7), (8,))]
    reasons = (FinishReason.LENGTH, FinishReason.STOP)
    both = tuple(SequenceTokens(index, tokens[index], reasons[index]) for index in (0, 1))
    line.push(TokensOut(line.request.request_id, both, finished=True))


async def asked(node: Node, body: dict[str, Any]) -> Any:
    async with node.session.post(f"{node.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()
        return node.engine.requests[-1].sampling, response.headers


@pytest.mark.long
async def test_the_engine_is_asked_for_beams() -> None:
    async with running(FakeEngine(answers)) as node:
        sampling, _ = await asked(node, SEARCH | {"temperature": 1, "top_k": -1, "seed": 3})
        assert sampling.beams == BeamParams(width=2)
        assert (sampling.n, sampling.temperature, sampling.num_first_tokens) == (2, 0.0, 1)
        more = {"best_of": 5, "length_penalty": 2, "early_stopping": "never", "stop_token_ids": [7], "logprobs": 1}
        sampling, headers = await asked(node, SEARCH | more)
        assert sampling.beams == BeamParams(width=5, length_penalty=2.0, early_stopping="never")
        assert node.engine.requests[-1].num_sequences == 5
        assert "x-pd-ignored" not in headers


async def test_fields_of_beams_without_a_search_are_named() -> None:
    async with running(FakeEngine(says([5, 6]))) as node:
        body = {"prompt": "hi", "length_penalty": 2, "early_stopping": True, "use_beam_search": False}
        sampling, headers = await asked(node, body)
    assert sampling.beams is None
    assert headers["x-pd-ignored"] == "early_stopping,length_penalty"


@pytest.mark.long
async def test_structured_output_excludes_beams() -> None:
    pytest.importorskip("llguidance")
    async with running(FakeEngine(answers)) as node:
        body = SEARCH | {"structured_outputs": {"choice": ["a", "b"]}}
        async with node.session.post(f"{node.url}/v1/completions", json=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "use_beam_search"
        assert not node.engine.requests


async def test_a_stream_has_each_answer_as_one_piece() -> None:
    async with running(FakeEngine(answers)) as node:
        whole = SEARCH | {"return_token_ids": True}
        async with node.session.post(f"{node.url}/v1/completions", json=whole) as response:
            choices = (await response.json())["choices"]
        events = await post_events(node.session, f"{node.url}/v1/completions", whole | {"stream": True})
    pieces = [event["choices"][0] for _, event in events if event != "[DONE]"]
    assert [piece["index"] for piece in pieces] == [0, 1]
    for piece, choice in zip(pieces, choices, strict=True):
        assert (piece["text"], piece["token_ids"]) == (choice["text"], choice["token_ids"])
        assert piece["finish_reason"] == choice["finish_reason"]


async def test_routers_cannot_continue_the_stream_of_a_search() -> None:
    async with running(FakeEngine(answers)) as node:
        headers = {"x-pd-frames": "1"}
        versions = []
        for body in (SEARCH, {"prompt": "hi"} | {"n": 2}):
            async with node.session.post(
                f"{node.url}/v1/completions", json=body | {"stream": True}, headers=headers
            ) as response:
                versions.append(await response.read())
    assert node.state.stream_version(node.state.ready).encode() not in versions[0]
    assert node.state.stream_version(node.state.ready).encode() in versions[1]


async def test_the_sampling_that_p_gets_has_the_beams() -> None:
    async with running(FakeEngine(answers)) as node:
        sampling, _ = await asked(node, SEARCH)
    sent = msgspec.json.decode(msgspec.json.encode(sampling), type=type(sampling))
    assert sent.first_token_digest == sampling.first_token_digest
    assert sent.beams == sampling.beams
