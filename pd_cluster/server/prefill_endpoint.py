"""P's side of a handoff: the answer to a prefill leg.

With the header `x-pd-ticket: stream` the ticket is sent at admission, before P computes anything:

    event: ticket    data: {"kv_transfer_params": {...}}
    event: done      data: {"usage": {...}}                     the KV of the whole prompt can be read
    event: error     data: {"error": {...}, "status": 503}      instead of done
    : waiting                                                   every second until there is a ticket

Other routers wait for one JSON completion that contains the same kv_transfer_params. In both cases P aborts the prefill
when the caller closes the connection before the end.

A ticket is for one prompt. For several prompts P computes nothing. Other routers get a completion without
kv_transfer_params and send the unchanged request to D, which prefills. Our own router sends such requests D-first, so a
leg with several prompts that asks for a ticket is an error.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import InvalidRequest, PdError
from pd_cluster.protocol.messages import FinishReason
from pd_cluster.server.choice import ChoiceOutput
from pd_cluster.server.keepalive import KeepAlive
from pd_cluster.server.response import ResponseShape, collect, usage_of
from pd_connectors.protocol.ticket import sign
from pd_http.sse import event_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.server.answer_task import CountedReply
    from pd_cluster.server.generation_stream import GenerationStream
    from pd_cluster.server.state import NodeState
    from pd_cluster.server.takeover_policy import Tokenize
    from pd_http.dialect import Dialect
    from pd_http.reply import Reply


def transfer_params(state: NodeState, stream: GenerationStream, *, echo_ids: bool) -> dict[str, Any]:
    """kv_transfer_params for D: the signed ticket, which our own D reads, and the fields of vLLM's connector.

    `echo_ids`: add the token ids of the prompt, for a caller that sent text. Raises PdError without a ticket.
    """
    ticket = stream.ticket
    if ticket is None:
        raise PdError("the engine prefilled without opening a lease")
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": ticket.lease.engine_id,
        "remote_block_ids": [],
        "remote_host": ticket.host,
        "remote_port": ticket.port,
        "ticket": sign(state.key, ticket),
    }
    if stream.request.steps:
        params["prompt_steps"] = stream.request.steps
    return params | {"prompt_token_ids": stream.request.prompt} if echo_ids else params


def keeping_alive(state: NodeState, reply: Reply) -> KeepAlive:
    """Keep-alives until there is a ticket. Enter it before any slow part of the request."""
    return KeepAlive(reply, {"x-pd-prefill": state.node_id}, partial(_error_event, reply.dialect))


async def answer_prefill_stream(
    state: NodeState, reply: CountedReply, stream: GenerationStream, alive: KeepAlive, *, echo_ids: bool
) -> None:
    """Send the ticket at once, and `done` after the prefill."""
    has_ticket = False
    async with stream:
        async for _ in stream:
            if not has_ticket:
                has_ticket = True
                params = transfer_params(state, stream, echo_ids=echo_ids)
                await alive.start_events()
                await reply.write(event_bytes({"kv_transfer_params": params}, "ticket"))
        await reply.end(event_bytes({"usage": usage_of([stream])}, "done"))
        await stream.settle()


async def answer_prefill_whole(
    state: NodeState, reply: CountedReply, stream: GenerationStream, shape: ResponseShape, *, echo_ids: bool
) -> None:
    """Send one completion: the first token as its text, and kv_transfer_params."""
    async with stream:
        choices = await collect([stream], reply.share)
        params = transfer_params(state, stream, echo_ids=echo_ids)
        body = shape.body(choices, usage_of([stream])) | {"kv_transfer_params": params}
        await reply.json(200, body, {"x-pd-prefill": state.node_id})
        await stream.settle()


async def answer_without_prefill(
    reply: Reply, shape: ResponseShape, prompts: Sequence[Tokenize], *, wants_ticket: bool
) -> None:
    """Answer a leg of several prompts: empty choices, and the number of prompt tokens, which vLLM's router reports.

    Raises InvalidRequest when the caller asks for a ticket.
    """
    if wants_ticket:
        raise InvalidRequest(
            f"a prefill leg takes one prompt, not {len(prompts)}; send such requests D-first",
            "prompt",
            "one_prompt_per_ticket",
        )
    choices = [ChoiceOutput(i, finish_reason=FinishReason.LENGTH) for i in range(len(prompts))]
    num_tokens = sum([len(await tokenize()) for tokenize in prompts])
    usage = usage_of([]) | {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    await reply.json(200, shape.body(choices, usage))


def _error_event(dialect: Dialect, error: PdError) -> bytes:
    return event_bytes(dialect.error_body(error) | {"status": error.status}, "error")
