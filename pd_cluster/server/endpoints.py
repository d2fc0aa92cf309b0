"""POST /v1/chat/completions and /v1/completions: from a body to generation requests and the way to answer them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pd_cluster.errors import EngineUnavailable, InvalidRequest, Overloaded
from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling.turns import crowd_limit
from pd_cluster.server.chat import ChatShape, chat_num_logprobs, check_tools, normal_messages, template_options
from pd_cluster.server.completions import DEFAULT_MAX_TOKENS, CompletionShape, Prompt, check_best_of, prompts_of
from pd_cluster.server.fields import ignored_header
from pd_cluster.server.generation_request import GenerationRequest, KvSource
from pd_cluster.server.generation_stream import GenerationStream
from pd_cluster.server.grammar_source import grammar_source
from pd_cluster.server.prefill_endpoint import (
    answer_prefill_stream,
    answer_prefill_whole,
    answer_without_prefill,
    keeping_alive,
)
from pd_cluster.server.response import answer_stream, answer_whole
from pd_cluster.server.sampling import (
    SAMPLING_PARAM,
    check_logits_args,
    check_min_tokens,
    check_room_for_output,
    decode_sampling,
    sampling_params,
    text_options,
)
from pd_cluster.server.schema import (
    MAX_LISTED_TOKENS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    KvTransferParams,
    decode_body,
)
from pd_cluster.server.takeover_policy import Tokenize, choose_kv_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.server.answer_task import CountedReply
    from pd_cluster.server.output_parser import ParserFactory
    from pd_cluster.server.state import NodeState

Generating = TypeVar("Generating", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class Caller:
    """Values of the request's headers, and its time of arrival."""

    request_id: str
    group: str  # see `GenerationRequest.group`
    wants_ticket_stream: bool
    started_s: float  # monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A decoded body with everything in which chat and completions differ."""

    body: GenerationBody
    prompts: Sequence[Tokenize]
    logprobs: int | None  # alternatives for each token; None: no logprobs
    shape: type[ChatShape | CompletionShape]
    echo_ids: bool  # the caller sent text, so a prefill leg answers with its token ids
    prompt_field: str
    default_max_tokens: int | None = None
    parser: ParserFactory | None = None
    grammar: str = ""  # of the output

    @property
    def is_prefill_leg(self) -> bool:
        params = self.body.kv_transfer_params
        return params is not None and bool(params.do_remote_decode)


async def chat_completions(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/chat/completions`: generate for the body `raw`, and answer through `reply`. Raises PdError."""
    body = _decoded(state, reply, raw, ChatBody)
    logprobs = chat_num_logprobs(body)
    check_tools(body)
    messages, options = normal_messages(body.messages), template_options(body)

    async def tokenize() -> list[int]:
        return await state.tokenizer.encode_chat(
            messages,
            None,
            options,
            max_tokens=state.ready.max_model_len,
            add_special_tokens=bool(body.add_special_tokens),
        )

    call = _Call(
        body=body,
        prompts=[tokenize],
        logprobs=logprobs,
        shape=ChatShape,
        echo_ids=True,
        prompt_field="messages",
        parser=state.output_parser,
    )
    await _generate(state, caller, reply, call)


async def completions(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/completions`: generate for the body `raw`, and answer through `reply`. Raises PdError."""
    body = _decoded(state, reply, raw, CompletionBody)
    prompts = prompts_of(body, state.tokenizer.vocab_size, state.ready.max_model_len)

    async def tokenize(prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return await state.tokenizer.encode(
            prompt,
            max_tokens=state.ready.max_model_len,
            add_special_tokens=body.add_special_tokens is not False,
        )

    call = _Call(
        body=body,
        prompts=[partial(tokenize, prompt) for prompt in prompts],
        logprobs=body.logprobs,
        shape=CompletionShape,
        echo_ids=any(isinstance(prompt, str) for prompt in prompts),
        prompt_field="prompt",
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )
    await _generate(state, caller, reply, call)


async def _generate(state: NodeState, caller: Caller, reply: CountedReply, call: _Call) -> None:
    if state.draining:
        raise EngineUnavailable("this node is shutting down")
    body, prompts = call.body, call.prompts
    include_usage = bool(body.stream and body.stream_options and body.stream_options.include_usage)
    shape = call.shape(
        caller.request_id,
        state.model_name,
        state.tokenizer,
        with_logprobs=call.logprobs is not None,
        include_usage=include_usage,
    )
    state.check_model(body.model)
    _check_common(body)
    if call.is_prefill_leg:
        reply.endpoint = "prefill"
        if len(prompts) > 1:
            state.metrics.fallbacks.labels("several_prompts").inc()
            await answer_without_prefill(reply, shape, prompts, wants_ticket=caller.wants_ticket_stream)
            return
    _check_lists(body, len(prompts))
    check_logits_args(body.logits_args, state.config.model.logits_stages, len(prompts))
    _check_queue_room(state, len(prompts))
    call = replace(call, grammar=await _grammar(state, call))
    if call.is_prefill_leg and caller.wants_ticket_stream:
        async with keeping_alive(state, reply) as alive:
            request = await _request(state, caller, call, 0)
            stream = GenerationStream(state, request, caller.started_s)
            await answer_prefill_stream(state, reply, stream, alive, echo_ids=call.echo_ids)
        return
    requests = [await _request(state, caller, call, i) for i in range(len(prompts))]
    streams = [GenerationStream(state, request, caller.started_s) for request in requests]
    if call.is_prefill_leg:
        await answer_prefill_whole(state, reply, streams[0], shape, echo_ids=call.echo_ids)
    elif body.stream:
        await answer_stream(state, reply, streams, shape, body.stream_options)
    else:
        await answer_whole(state, reply, streams, shape)


async def _request(state: NodeState, caller: Caller, call: _Call, index: int) -> GenerationRequest:
    """The generation request of the call's prompt `index`."""
    body = call.body
    params, salt = body.kv_transfer_params, body.cache_salt or ""
    if call.is_prefill_leg:
        prompt = await call.prompts[index]()
        kv_source = KvSource(Work.PREFILL, hold_lease=not caller.wants_ticket_stream)
    else:
        if params is not None and len(call.prompts) > 1:
            # a ticket is for one prompt: each prompt asks the offer's nodes for its own
            params = KvTransferParams(do_remote_prefill=params.do_remote_prefill, offer=params.offer)
        prompt, kv_source = await choose_kv_source(state, params, call.prompts[index], salt)
    if not prompt:
        raise InvalidRequest("the prompt has no tokens; at least one is required", call.prompt_field)
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        client_request_id=caller.request_id,
        prompt=prompt,
        sampling=_sampling(state, call, len(prompt)),
        text=text_options(body, call.parser),
        priority=body.priority or 0 if state.config.scheduler.priorities else 0,
        salt=salt,
        kv_source=kv_source,
        group=caller.group,
    )


async def _grammar(state: NodeState, call: _Call) -> str:
    """The grammar of the answers, "" for none: that of the body, or on a prefill leg the one that D sent."""
    params = call.body.kv_transfer_params
    if call.is_prefill_leg and params is not None and params.sampling is not msgspec.UNSET:
        grammar = decode_sampling(bytes(params.sampling)).grammar
        if grammar:
            await state.grammar_checks.check(grammar, SAMPLING_PARAM)
        return grammar
    return await state.grammar_checks.grammar(grammar_source(call.body), len(call.prompts))


def _sampling(state: NodeState, call: _Call, num_prompt_tokens: int) -> SamplingParams:
    """The validated sampling parameters. A prefill leg samples one token, with the parameters of D if D sent them."""
    max_model_len = state.ready.max_model_len
    check_room_for_output(num_prompt_tokens, max_model_len, call.prompt_field)
    body, params = call.body, call.body.kv_transfer_params
    if call.is_prefill_leg and params is not None and params.sampling is not msgspec.UNSET:
        sampling = msgspec.structs.replace(decode_sampling(bytes(params.sampling)), max_tokens=1)
        check_logits_args(sampling.logits_args, state.config.model.logits_stages, 1)
    else:
        if call.is_prefill_leg:
            body = msgspec.structs.replace(body, max_tokens=1, max_completion_tokens=None)
        sampling = sampling_params(
            body,
            state.defaults,
            logprobs=call.logprobs,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=max_model_len,
            default_max_tokens=call.default_max_tokens,
            grammar=call.grammar,
        )
    sampling.validate(state.tokenizer.vocab_size)
    if not call.is_prefill_leg:
        check_min_tokens(sampling)
    return sampling


def _decoded(state: NodeState, reply: CountedReply, raw: bytes, kind: type[Generating]) -> Generating:
    body, unread = decode_body(raw, kind)
    state.metrics.unknown_fields.inc(len(unread))
    reply.headers |= ignored_header(unread | _disabled_fields(state, body))
    return body


def _check_lists(body: GenerationBody, num_prompts: int) -> None:
    """Raises InvalidRequest when the token lists of all prompts together are too long."""
    for name in ("logit_bias", "stop_token_ids"):
        num_listed = len(getattr(body, name) or ()) * num_prompts
        if num_listed > MAX_LISTED_TOKENS:
            raise InvalidRequest(
                f"{name} lists {num_listed // num_prompts} tokens for each of {num_prompts} prompts; "
                f"{MAX_LISTED_TOKENS} are allowed in all",
                name,
            )


def _check_queue_room(state: NodeState, num_prompts: int) -> None:
    """Refuse several prompts that the engine's queue cannot take together, before it has taken some of them.

    The engine decides: its statistics may be 0.1 s old. Raises InvalidRequest, Overloaded.
    """
    if num_prompts == 1:
        return
    limit, stats = crowd_limit(state.config.scheduler.max_waiting), state.engine.stats
    if num_prompts > limit:
        raise InvalidRequest(f"prompt has {num_prompts} entries; this node queues {limit} of one request", "prompt")
    num_queued = 0 if stats is None else stats.num_queued
    if num_queued + num_prompts > limit:
        raise Overloaded(
            f"{num_queued} prompts are waiting; this request's {num_prompts} may fill the queue up to {limit}"
        )


def _disabled_fields(state: NodeState, body: GenerationBody) -> set[str]:
    """Fields of the request that this node's settings disable."""
    return {"priority"} if body.priority and not state.config.scheduler.priorities else set()


def _check_common(body: GenerationBody) -> None:
    """Raises InvalidRequest."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    check_best_of(body)
    if not -(1 << 31) <= (body.priority or 0) < 1 << 31:
        raise InvalidRequest(f"priority must fit into 32 bits, not {body.priority}", "priority")
    if body.n is not None and not 1 <= body.n <= 128:
        raise InvalidRequest(f"n must be between 1 and 128, not {body.n}", "n")
