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

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from pd_cluster.errors import InvalidRequest, PdError
from pd_cluster.protocol.messages import FinishReason, Work
from pd_cluster.server.grammar.grammar_source import GrammarSource
from pd_cluster.server.params.sampling import SAMPLING_PARAM, decode_sampling
from pd_cluster.server.requests.choice import ChoiceOutput
from pd_cluster.server.requests.generation_request import KvSource
from pd_cluster.server.requests.generation_stream import GenerationStream
from pd_cluster.server.requests.keepalive import KeepAlive
from pd_cluster.server.requests.request_checks import check_logits_args
from pd_cluster.server.routes.generate import prepare
from pd_cluster.server.shapes.response import collect, extras_of, usage_of
from pd_connectors.protocol.ticket import sign
from pd_http.sse import event_bytes

if TYPE_CHECKING:
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.server.node.caller import Caller
    from pd_cluster.server.params.sampling import BadWords
    from pd_cluster.server.requests.answer_task import CountedReply
    from pd_cluster.server.requests.generation_ask import GenerationAsk
    from pd_cluster.server.state import NodeState
    from pd_http.dialect import Dialect
    from pd_http.reply import Reply


async def prefill_leg(state: NodeState, caller: Caller, reply: CountedReply, ask: GenerationAsk) -> None:
    """Compute the prompt of `ask` for another node. Raises PdError."""
    reply.endpoint = "prefill"
    if len(ask.prompts) > 1:
        state.metrics.fallbacks.labels("several_prompts").inc()
        await _answer_without_prefill(state, caller, reply, ask)
        return
    source = KvSource(Work.PREFILL, hold_lease=not caller.wants_ticket_stream)
    ask = _one_token(state, replace(ask, kv_source=source, scores=None))
    if caller.wants_ticket_stream:
        await _stream_ticket(state, caller, reply, ask)
        return
    [request] = await prepare(state, caller, ask)
    stream = GenerationStream(state, request, caller.started_s)
    shape = ask.shape(await extras_of(state, caller, ask, [stream]))
    async with stream:
        choices = await collect([stream], reply.share)
        params = _transfer_params(state, stream, echo_ids=ask.echo_ids)
        body = shape.body(choices, usage_of([stream])) | {"kv_transfer_params": params}
        await reply.json(200, body, {"x-pd-prefill": state.node_id})
        await stream.settle()


async def _stream_ticket(state: NodeState, caller: Caller, reply: Reply, ask: GenerationAsk) -> None:
    """Send the ticket at once, and `done` after the prefill."""
    async with KeepAlive(reply, {"x-pd-prefill": state.node_id}, partial(_error_event, reply.dialect)) as alive:
        [request] = await prepare(state, caller, ask)
        has_ticket = False
        async with GenerationStream(state, request, caller.started_s) as stream:
            async for _ in stream:
                if not has_ticket:
                    has_ticket = True
                    params = _transfer_params(state, stream, echo_ids=ask.echo_ids)
                    await alive.start_events()
                    await reply.write(event_bytes({"kv_transfer_params": params}, "ticket"))
            await reply.end(event_bytes({"usage": usage_of([stream])}, "done"))
            await stream.settle()


def _one_token(state: NodeState, ask: GenerationAsk) -> GenerationAsk:
    """`ask` for the first token alone: with the parameters of D if D sent them, else with the body's."""
    if ask.params.sampling is msgspec.UNSET:
        return replace(ask, sampling=partial(_own_sampling, ask))
    raw = bytes(ask.params.sampling)
    return replace(ask, form=partial(_sent_form, raw), sampling=partial(_sent_sampling, state, raw))


def _own_sampling(ask: GenerationAsk, num_tokens: int, grammar: str, bad_words: BadWords) -> SamplingParams:
    """Those of the body, without the `min_tokens` 1 that vllm-router sets beside its limit of one token.

    D is asked without it, so it would draw the first token of each prompt again: with states all of the prompt.
    """
    sampling, body = ask.sampling(num_tokens, grammar, bad_words, one_token=True), ask.body
    is_set = body.max_tokens == body.min_tokens == 1 and ask.kv_source is not None and ask.kv_source.hold_lease
    return msgspec.structs.replace(sampling, min_tokens=0) if is_set else sampling


async def _sent_form(raw: bytes) -> GrammarSource | None:
    grammar = decode_sampling(raw).grammar
    return GrammarSource(SAMPLING_PARAM, "written", grammar) if grammar else None


def _sent_sampling(state: NodeState, raw: bytes, _: int, grammar: str, __: BadWords) -> SamplingParams:
    sampling = msgspec.structs.replace(decode_sampling(raw), max_tokens=1)
    check_logits_args(sampling.logits_args, state.config.model.logits_stages, 1)
    sampling.validate(state.tokenizer.vocab_size)
    return sampling


def _transfer_params(state: NodeState, stream: GenerationStream, *, echo_ids: bool) -> dict[str, Any]:
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


async def _answer_without_prefill(state: NodeState, caller: Caller, reply: Reply, ask: GenerationAsk) -> None:
    """Answer a leg of several prompts: empty choices, and the number of prompt tokens, which vLLM's router reports.

    Raises InvalidRequest when the caller asks for a ticket.
    """
    if caller.wants_ticket_stream:
        raise InvalidRequest(
            f"a prefill leg takes one prompt, not {len(ask.prompts)}; send such requests D-first",
            "prompt",
            "one_prompt_per_ticket",
        )
    shape = ask.shape(await extras_of(state, caller, ask))
    choices = [ChoiceOutput(i, finish_reason=FinishReason.LENGTH) for i in range(len(ask.prompts))]
    num_tokens = sum([len(await tokenize()) for tokenize in ask.prompts])
    usage = usage_of([]) | {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    await reply.json(200, shape.body(choices, usage))


def _error_event(dialect: Dialect, error: PdError) -> bytes:
    return event_bytes(dialect.error_body(error) | {"status": error.status}, "error")
