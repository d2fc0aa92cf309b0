"""P's side of a handoff: answering the leg that only prefills.

With the header `x-pd-ticket: stream` the ticket goes out at admission, before anything is computed:

    event: ticket    data: {"kv_transfer_params": {...}}
    event: done      data: {"usage": {...}}                     the whole prompt's KV can be read
    event: error     data: {"error": {...}, "status": 503}      instead of done
    : waiting                                                   every second until there is a ticket

Other routers wait for one JSON completion, with the same kv_transfer_params in it. Either way P gives up
when the caller hangs up before the end.

A ticket is for one prompt. Of several, P computes nothing: other routers get a completion without kv_transfer_params,
and send D the request as it is; D prefills. Our own router sends such requests D-first, so that its leg is an error.
"""

from __future__ import annotations

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

    from pd_cluster.server.generation_stream import GenerationStream
    from pd_cluster.server.state import NodeState
    from pd_cluster.server.takeover_policy import Tokenize
    from pd_http.reply import Reply


def transfer_params(state: NodeState, stream: GenerationStream, *, echo_ids: bool) -> dict[str, Any]:
    """What D needs. Only the signed ticket counts for our own D; the rest is what vLLM's connector writes.

    `echo_ids` is False when the caller brought the ids itself.
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
    return params | {"prompt_token_ids": stream.request.prompt} if echo_ids else params


def keeping_alive(state: NodeState, reply: Reply) -> KeepAlive:
    """Enter it before anything of the request may take long."""
    return KeepAlive(reply, {"x-pd-prefill": state.node_id}, _error_event)


async def answer_prefill_stream(
    state: NodeState, reply: Reply, stream: GenerationStream, alive: KeepAlive, *, echo_ids: bool
) -> None:
    """The ticket at once, then silence until the prefill is over."""
    is_told = False
    async with stream:
        async for _ in stream:
            if not is_told:
                is_told = True
                params = transfer_params(state, stream, echo_ids=echo_ids)
                await alive.start_events()
                await reply.write(event_bytes({"kv_transfer_params": params}, "ticket"))
        await reply.end(event_bytes({"usage": usage_of([stream])}, "done"))
        await stream.settle()


async def answer_prefill_whole(
    state: NodeState, reply: Reply, stream: GenerationStream, shape: ResponseShape, *, echo_ids: bool
) -> None:
    """One completion with the first token as its text."""
    async with stream:
        choices = await collect([stream])
        params = transfer_params(state, stream, echo_ids=echo_ids)
        body = shape.body(choices, usage_of([stream])) | {"kv_transfer_params": params}
        await reply.json(200, body, {"x-pd-prefill": state.node_id})
        await stream.settle()


async def answer_without_prefill(
    reply: Reply, shape: ResponseShape, prompts: Sequence[Tokenize], *, wants_ticket: bool
) -> None:
    """Several prompts. vLLM's router shows its client P's count of them. Raises InvalidRequest when the caller insists
    on a ticket."""
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


def _error_event(error: PdError) -> bytes:
    return event_bytes(error.to_body() | {"status": error.status}, "error")
