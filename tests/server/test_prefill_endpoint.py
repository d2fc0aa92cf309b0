"""P's leg, as our router and D ask for it and as foreign routers do."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from pd_cluster.protocol.messages import FinishReason, RequestFailed, TicketOpened, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.params.sampling import SAMPLING_PARAM
from pd_connectors.protocol.hashing import prompt_digest
from pd_connectors.protocol.ticket import Ticket, verify
from tests.server.fake_engine import FakeEngine, Line, says
from tests.server.live_server import KEY, running
from tests.server.sse import next_event, post_events

pytestmark = pytest.mark.anyio

# what vLLM-style routers send
FOREIGN = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
STREAM = {"x-pd-ticket": "stream"}


def ticket_in(params: dict[str, Any]) -> Ticket:
    return verify(KEY, params["ticket"], Ticket, time.time())


async def test_ticket_comes_before_any_token_and_done_after_the_last() -> None:
    async def script(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        # the test lets the prefill go on once it has the ticket
        await line.engine.released.wait()
        line.tokens([5], finish=FinishReason.LENGTH, num_cached=3)

    body = {"prompt": "Hello there.", "max_tokens": 1, "min_tokens": 4, "n": 1, "kv_transfer_params": FOREIGN}
    async with running(FakeEngine(script)) as node:
        buffer = bytearray()
        async with node.session.post(f"{node.url}/v1/completions", json=body, headers=STREAM) as response:
            name, data = await next_event(response, buffer)
            assert (name, response.content_type) == ("ticket", "text/event-stream")
            node.engine.released.set()
            done = await next_event(response, buffer)
            assert await response.content.read() == b""
        request = node.engine.requests[0]
        ids = await node.state.tokenizer.encode("Hello there.", max_tokens=4096)
    params = data["kv_transfer_params"]
    assert params["prompt_token_ids"] == ids == request.prompt_token_ids
    assert ticket_in(params).prompt_digest == prompt_digest(ids)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_engine_id"], params["remote_block_ids"]) == ("fake-engine", [])
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", 4242)
    assert done[0] == "done"
    assert done[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert (request.work, request.hold_lease) == (Work.PREFILL, False)
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (1, 4)
    assert node.metric('pd_requests_total{endpoint="prefill",outcome="ok"}') == 1
    assert node.metric("pd_time_to_first_token_seconds_count") == 0, "P's times are not the client's"


async def test_samples_and_settings_of_the_real_request_are_kept() -> None:
    body = {"prompt": "a", "max_tokens": 50, "n": 2, "temperature": 0.3, "seed": 9, "kv_transfer_params": FOREIGN}
    async with running(FakeEngine(says([5]))) as node:
        events = await post_events(node.session, f"{node.url}/v1/completions", body, STREAM)
        sampling = node.engine.requests[0].sampling
    assert [name for name, _ in events] == ["ticket", "done"]
    assert (sampling.n, sampling.temperature, sampling.seed, sampling.max_tokens) == (2, 0.3, 9, 1)
    assert ticket_in(events[0][1]["kv_transfer_params"]).num_samples == 2


async def test_sampling_parameters_of_d_replace_the_fields_of_the_body() -> None:
    sampling = {"max_tokens": 9, "n": 3, "seed": 4, "logit_bias": {"7": 2.5}, "top_k": 2, "min_tokens": 20}
    async with running(FakeEngine(says([5]))) as node:
        for told in ({"sampling": sampling}, {}):
            body = {"prompt": "a", "seed": 1, "kv_transfer_params": FOREIGN | told}
            await post_events(node.session, f"{node.url}/v1/completions", body, STREAM)
        told_by_d, plain = (request.sampling for request in node.engine.requests)
    assert told_by_d == msgspec.convert(sampling | {"max_tokens": 1}, SamplingParams, strict=False)
    assert plain == SamplingParams(max_tokens=1, seed=1)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"of_a_newer_d": 1}, SAMPLING_PARAM),
        ({"seed": "x"}, SAMPLING_PARAM),
        ({"temperature": 9}, "temperature"),
        ({"seed": 2**63}, "seed"),
        ({"n": 129}, "n"),
        ({"logit_bias": {"3072": 1}}, "logit_bias"),
    ],
)
async def test_sampling_parameters_of_d_are_validated_as_those_of_a_client(wrong: dict[str, Any], param: str) -> None:
    """An unknown field is refused, too: P would sample the first token without it."""
    async with running(FakeEngine(says([5]))) as node:
        params = FOREIGN | {"sampling": {"max_tokens": 1} | wrong}
        body = {"prompt": "a", "kv_transfer_params": params}
        async with node.session.post(f"{node.url}/v1/completions", json=body, headers=STREAM) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, param), error
        assert node.engine.requests == []


async def test_ids_are_not_sent_back_to_a_caller_that_sent_them() -> None:
    async with running(FakeEngine(says([5]))) as node:
        body = {"prompt": [5, 6, 7], "kv_transfer_params": FOREIGN}
        events = await post_events(node.session, f"{node.url}/v1/completions", body, STREAM)
    assert "prompt_token_ids" not in events[0][1]["kv_transfer_params"]
    assert ticket_in(events[0][1]["kv_transfer_params"]).num_tokens == 3


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_foreign_router_gets_one_body_with_the_ticket_inside(path: str) -> None:
    base = {"prompt": "Hello"} if path == "completions" else {"messages": [{"role": "user", "content": "Hello"}]}
    async with running(FakeEngine(says([5]))) as node:
        body = base | {"max_tokens": 1, "min_tokens": 2, "stream": False, "kv_transfer_params": FOREIGN}
        async with node.session.post(f"{node.url}/v1/{path}", json=body) as response:
            answer = await response.json()
            assert (response.status, response.content_type) == (200, "application/json")
        request = node.engine.requests[0]
        first = await node.state.tokenizer.decode([5])
    choice = answer["choices"][0]
    assert (choice.get("text") or choice["message"]["content"]) == first
    assert answer["kv_transfer_params"]["prompt_token_ids"] == request.prompt_token_ids
    assert ticket_in(answer["kv_transfer_params"]).num_tokens == len(request.prompt_token_ids)
    assert (request.work, request.hold_lease, request.sampling.max_tokens) == (Work.PREFILL, True, 1)


async def test_failure_before_the_ticket_is_a_status() -> None:
    async def script(line: Line) -> None:
        line.push(RequestFailed(line.request.request_id, "Overloaded", "full"))

    async with running(FakeEngine(script)) as node:
        body = {"prompt": "a", "kv_transfer_params": FOREIGN}
        async with node.session.post(f"{node.url}/v1/completions", json=body, headers=STREAM) as response:
            assert (response.status, response.content_type) == (503, "application/json")
            assert (await response.json())["error"]["code"] == "overloaded"


@pytest.mark.parametrize("aborted", [True, False])
async def test_failure_after_the_ticket_is_an_error_event(aborted: bool) -> None:
    async def script(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        if aborted:
            line.tokens([], finish=FinishReason.ABORT)
        else:
            line.push(RequestFailed(line.request.request_id, "EngineUnavailable", "it died"))

    async with running(FakeEngine(script)) as node:
        body = {"prompt": "a", "kv_transfer_params": FOREIGN}
        events = await post_events(node.session, f"{node.url}/v1/completions", body, STREAM)
    assert [name for name, _ in events] == ["ticket", "error"]
    assert events[1][1]["status"] == 503
    assert events[1][1]["error"]["code"] == "engine_unavailable"


async def test_bad_input_is_plain_json_even_when_a_stream_was_asked_for() -> None:
    async with running(FakeEngine(says([5]))) as node:
        body = {"prompt": "a", "temperature": 9, "kv_transfer_params": FOREIGN}
        async with node.session.post(f"{node.url}/v1/completions", json=body, headers=STREAM) as response:
            assert (response.status, response.content_type) == (400, "application/json")
            assert (await response.json())["error"]["param"] == "temperature"


async def test_several_prompts_are_answered_without_a_ticket_and_left_to_d() -> None:
    """A foreign P-first router sends D the unchanged request when P answers without kv_transfer_params."""
    async with running(FakeEngine(says([5]))) as node:
        body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1, "stream": False, "kv_transfer_params": FOREIGN}
        async with node.session.post(f"{node.url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200
        assert "kv_transfer_params" not in answer
        assert [choice["text"] for choice in answer["choices"]] == ["", ""]
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 0, 2)
        async with node.session.post(f"{node.url}/v1/completions", json=body, headers=STREAM) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (400, "one_prompt_per_ticket")
        assert node.engine.requests == []
        assert node.metric('pd_handoff_fallbacks_total{reason="several_prompts"}') == 2


@pytest.mark.parametrize(("asked", "headers", "used"), [(9, {}, 9), (1, {}, 0), (1, STREAM, 1)])
async def test_min_tokens_are_those_of_the_real_request(asked: int, headers: dict[str, str], used: int) -> None:
    """More than one is no error of the leg; one is what vllm-router adds to it, and our own does not."""
    async with running(FakeEngine(says([5]))) as node:
        body = {"prompt": "a", "max_tokens": 1, "min_tokens": asked, "kv_transfer_params": FOREIGN}
        async with node.session.post(f"{node.url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
            await response.read()
        assert node.engine.requests[0].sampling.min_tokens == used
