"""The generating endpoints: from a body to generation requests and the way to answer them."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pd_cluster.errors import InvalidRequest
from pd_cluster.models.model_task import GENERATE
from pd_cluster.protocol.messages import Work
from pd_cluster.server.answer_extras import AnswerExtras, echo_texts
from pd_cluster.server.beam_fields import check_beam_choice, with_beams
from pd_cluster.server.chat import ChatShape, chat_num_logprobs, template_options
from pd_cluster.server.chat_grammar import chat_grammar_source, check_format, parser_options
from pd_cluster.server.completions import DEFAULT_MAX_TOKENS, CompletionShape, prompts_of, reads_only
from pd_cluster.server.continuation import check_prompts, known_answers, resume
from pd_cluster.server.generation_request import GenerationRequest, KnownAnswer, KvSource
from pd_cluster.server.generation_stream import GenerationStream
from pd_cluster.server.grammar_source import form_of
from pd_cluster.server.messages_shape import MessagesShape
from pd_cluster.server.output_parser import DEFAULT_OPTIONS, ParserOptions
from pd_cluster.server.prefill_endpoint import (
    answer_prefill_stream,
    answer_prefill_whole,
    answer_without_prefill,
    keeping_alive,
)
from pd_cluster.server.prompt_scores import PromptAsk, PromptScores
from pd_cluster.server.prompt_steps import NO_STEPS, PromptSteps, given_steps, names_for
from pd_cluster.server.reasoning_options import reasoning_options
from pd_cluster.server.request_checks import check_common, check_lists, check_queue_room, decoded, name_ignored
from pd_cluster.server.response import ResponseShape, answer_stream, answer_whole, stream_head
from pd_cluster.server.responses_shape import ResponsesShape
from pd_cluster.server.sampling import (
    SAMPLING_PARAM,
    check_logits_args,
    check_min_tokens,
    check_room_for_output,
    decode_sampling,
    last_tokens,
    sampling_params,
    text_options,
)
from pd_cluster.server.schema import ChatBody, CompletionBody, GenerationBody, KvTransferParams
from pd_cluster.server.stream_writer import EventWriter, FrameWriter
from pd_cluster.server.takeover_policy import Tokenize, choose_kv_source
from pd_cluster.server.tool_use import tool_use
from pd_cluster.server.translated_body import translated
from pd_http.dialects import MESSAGES, RESPONSES
from pd_http.left_out import EMPTY, LeftOut

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.server.answer_task import CountedReply
    from pd_cluster.server.caller import Caller
    from pd_cluster.server.grammar_source import GrammarSource
    from pd_cluster.server.output_parser import ParserFactory
    from pd_cluster.server.prompt_list import Prompt
    from pd_cluster.server.state import NodeState
    from pd_cluster.server.stream_writer import StreamWriter
    from pd_http.frames import Continuation
    from pd_http.left_out import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A decoded body with everything in which chat and completions differ."""

    body: GenerationBody
    prompts: Sequence[Tokenize]
    logprobs: int | None  # alternatives for each token; None: no logprobs
    shape: Callable[[AnswerExtras], ResponseShape]
    echo_ids: bool  # the caller sent text, so a prefill leg answers with its token ids
    prompt_field: str
    source: Callable[[], Awaitable[GrammarSource | None]]  # of the output's grammar
    default_max_tokens: int | None = None
    cuts_limit: bool = False  # the API requires a limit, so clients send their own: more than there is room for is cut
    parser: ParserFactory | None = None
    parser_options: ParserOptions = DEFAULT_OPTIONS
    grammar: str = ""  # of the output
    bad_words: tuple[tuple[int, ...], ...] = ()  # as token ids
    echoes: Sequence[Prompt] = ()  # with `echo`: the prompts as they came
    known: Sequence[KnownAnswer] = ()  # by prompt, of a stream that another node has begun
    names: PromptSteps | None = None  # of the blocks of a single prompt; None: no router asks for them
    ask: PromptAsk | None = None  # what the answers show of the prompts' log-probabilities
    is_read: bool = False  # nothing is generated

    @property
    def continuation(self) -> Continuation | None:
        params = self.body.kv_transfer_params
        return None if params is None else params.continuation

    @property
    def goes_on(self) -> bool:
        """Whether it is of a stream that was cut."""
        params = self.body.kv_transfer_params
        return bool(self.known) or (self.is_prefill_leg and params is not None and bool(params.goes_on))

    @property
    def is_prefill_leg(self) -> bool:
        params = self.body.kv_transfer_params
        return params is not None and bool(params.do_remote_decode)


async def chat_completions(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/chat/completions`: generate for the body `raw`, and answer through `reply`. Raises PdError."""
    await _chat(state, caller, reply, raw, ChatShape)


async def messages(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/messages`, as a chat request. Raises PdError."""
    one = translated(MESSAGES, raw)
    await _chat(state, caller, reply, one.chat, MessagesShape, one.left_out)


async def responses(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/responses`, as a chat request. Raises PdError."""
    one = translated(RESPONSES, raw)
    await _chat(state, caller, reply, one.chat, partial(ResponsesShape, one.given, one.calls), one.left_out)


async def _chat(
    state: NodeState,
    caller: Caller,
    reply: CountedReply,
    raw: bytes,
    shape: Callable[[AnswerExtras], ResponseShape],
    left_out: Mapping[str, Kind] = EMPTY,
) -> None:
    """`raw`: a chat body. `left_out`: what of the client's own body is not in it."""
    if shape is not ChatShape:
        await state.turns.take(len(raw))  # another one than for the translation
    body = decoded(state, reply, raw, ChatBody, left_out)
    _take_offer(caller, body)
    logprobs = chat_num_logprobs(body)
    use = tool_use(body, reply.dialect.tool_limits)
    check_format(use, state.tool_format, has_parser=state.output_parser is not None)
    messages = body.messages
    options = reasoning_options(body) | template_options(body)
    params = body.kv_transfer_params
    # A stream that goes on behind midnight has the prompt of the day on which it began
    began_s = None if params is None or params.continuation is None else params.continuation.head.created
    template = state.tokenizer.chat_template
    is_named = not template.writes_time and (began_s is None or not template.writes_date)
    names = names_for(state, body, raw) if is_named else None
    contents = [message.get("content") or "" for message in messages]

    async def tokenize() -> list[int]:
        prompt = await state.tokenizer.encode_chat(
            messages,
            use.shown,
            options,
            max_tokens=state.ready.max_model_len,
            add_special_tokens=bool(body.add_special_tokens),
            note=None if names is None else lambda encoded: names.name_text(encoded, contents),
            at_s=began_s,
            refuses=body.truncate_prompt_tokens is None,
        )
        return last_tokens(prompt, body)

    call = _Call(
        body=body,
        prompts=[tokenize],
        logprobs=logprobs,
        shape=shape,
        echo_ids=True,
        prompt_field="messages",
        cuts_limit=reply.dialect.requires_limit,
        source=partial(chat_grammar_source, body, use, state.tool_format, state.tokenizer, options),
        parser=state.output_parser,
        parser_options=parser_options(body, use),
        names=names,
        ask=PromptAsk.of(body.prompt_logprobs, None, names_are_ids=False),
    )
    await _generate(state, caller, reply, call)


async def completions(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/completions`: generate for the body `raw`, and answer through `reply`. Raises PdError."""
    body = decoded(state, reply, raw, CompletionBody)
    _take_offer(caller, body)
    await state.turns.take(len(raw))  # 2 million tokens take 0.1 s to here, and again behind it
    prompts = prompts_of(body, state.tokenizer.vocab_size, state.ready.max_model_len)
    names = names_for(state, body, raw) if len(prompts) == 1 else None

    async def tokenize(prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            if names is not None:
                await asyncio.to_thread(names.name_ids, len(prompt))
            return last_tokens(prompt, body)
        token_ids = await state.tokenizer.encode(
            prompt,
            max_tokens=state.ready.max_model_len,
            add_special_tokens=body.add_special_tokens is not False,
            note=None if names is None else lambda encoded: names.name_text(encoded, [prompt]),
            refuses=body.truncate_prompt_tokens is None,
        )
        return last_tokens(token_ids, body)

    call = _Call(
        body=body,
        prompts=[partial(tokenize, prompt) for prompt in prompts],
        logprobs=body.logprobs,
        shape=CompletionShape,
        echo_ids=any(isinstance(prompt, str) for prompt in prompts),
        prompt_field="prompt",
        source=partial(form_of, body),
        default_max_tokens=DEFAULT_MAX_TOKENS,
        echoes=prompts if body.echo else (),
        names=names,
        ask=PromptAsk.of(
            body.prompt_logprobs,
            body.logprobs if body.echo else None,
            names_are_ids=bool(body.return_tokens_as_token_ids),
        ),
        is_read=reads_only(body),
    )
    await _generate(state, caller, reply, call)


async def _generate(state: NodeState, caller: Caller, reply: CountedReply, call: _Call) -> None:
    state.check_task(GENERATE, "generated answers")
    body, prompts = call.body, call.prompts
    check_common(body)
    caller = replace(caller, request_id=body.request_id or body.rid or caller.request_id)
    if call.continuation is not None:
        version, vocab_size = state.stream_version(state.ready), state.tokenizer.vocab_size
        known = known_answers(call.continuation, body, version, vocab_size=vocab_size, num_prompts=len(prompts))
        head, call = call.continuation.head, replace(call, known=known)
        caller = replace(caller, request_id=head.response_id, drawn_seed=head.seed)
    if call.is_prefill_leg:
        reply.endpoint = "prefill"
        if len(prompts) > 1:
            state.metrics.fallbacks.labels("several_prompts").inc()
            shape = call.shape(await _extras(state, caller, call, ()))
            await answer_without_prefill(reply, shape, prompts, wants_ticket=caller.wants_ticket_stream)
            return
    check_lists(body, len(prompts))
    check_logits_args(body.logits_args, state.config.model.logits_stages, len(prompts))
    check_queue_room(state, len(prompts))
    bad_words = await state.tokenizer.encode_words(body.bad_words) if body.bad_words else ()
    call = replace(call, grammar=await _grammar(state, caller, call), bad_words=bad_words)
    check_beam_choice(body, call.grammar, state.config.model.logits_stages)
    if call.is_prefill_leg and caller.wants_ticket_stream:
        async with keeping_alive(state, reply) as alive:
            request = await _request(state, caller, call, 0)
            stream = GenerationStream(state, request, caller.started_s)
            await answer_prefill_stream(state, reply, stream, alive, echo_ids=call.echo_ids)
        return
    requests = [await _request(state, caller, call, i) for i in range(len(prompts))]
    if call.cuts_limit and any(one.sampling.max_tokens < (body.max_tokens or 0) for one in requests):
        name_ignored(state, reply, LeftOut(max_tokens="field"))
    if call.continuation is not None:
        check_prompts(call.continuation, requests)
    if call.ask is not None:
        call.ask.check_length(sum(len(one.prompt) * one.num_choices for one in requests))
        await reply.share.plan(call.ask.num_bytes([len(one.prompt) for one in requests], body.stream), call.ask.param)
    streams = [GenerationStream(state, request, caller.started_s) for request in requests]
    extras = await _extras(state, caller, call, requests, [one.scores for one in streams if one.scores is not None])
    shape = call.shape(extras)
    if call.is_prefill_leg:
        await answer_prefill_whole(state, reply, streams[0], shape, echo_ids=call.echo_ids)
    elif body.stream:
        writer: StreamWriter = EventWriter(reply)
        for number, stream in enumerate(streams if call.known else ()):
            await resume(stream, number * stream.request.num_choices, shape)
        if caller.wants_frames:
            version = state.stream_version(state.ready)
            writer = FrameWriter(reply, partial(stream_head, version, caller.request_id, extras.created, streams))
        await answer_stream(state, writer, streams, shape, body.stream_options)
    else:
        timed = body.stream_options is not None and bool(body.stream_options.include_timings)
        await answer_whole(state, reply, streams, shape, with_timings=timed, with_report=caller.wants_report)


def _take_offer(caller: Caller, body: GenerationBody) -> None:
    if caller.offer:
        body.kv_transfer_params = KvTransferParams(do_remote_prefill=True, offer=caller.offer)


async def _extras(
    state: NodeState,
    caller: Caller,
    call: _Call,
    requests: Sequence[GenerationRequest],
    scores: Sequence[PromptScores] = (),
) -> AnswerExtras:
    body = call.body
    given = [None] * len(call.echoes) if body.truncate_prompt_tokens is not None else call.echoes
    echoed = [(text, one.prompt) for text, one in zip(given, requests, strict=False)]
    created = {"created": call.known[0].created} if call.known else {}
    return AnswerExtras(
        request_id=caller.request_id,
        model=state.model_name,
        vocabulary=state.tokenizer,
        with_logprobs=call.logprobs is not None,
        include_usage=bool(body.stream and body.stream_options and body.stream_options.include_usage),
        n=body.n or 1,
        names_are_ids=bool(body.return_tokens_as_token_ids),
        token_ids=bool(body.return_token_ids),
        skip_special=body.skip_special_tokens is not False,
        prompts=[request.prompt for request in requests] if body.return_token_ids else (),
        echoes=await echo_texts(state.tokenizer, echoed),
        scores=scores,
        **created,
    )


async def _request(state: NodeState, caller: Caller, call: _Call, index: int) -> GenerationRequest:
    """The generation request of the call's prompt `index`."""
    body = call.body
    params, salt = body.kv_transfer_params, body.cache_salt or ""
    if call.is_prefill_leg:
        prompt = await call.prompts[index]()
        kv_source = KvSource(Work.PREFILL, hold_lease=not caller.wants_ticket_stream)
    elif call.is_read:
        prompt, kv_source = await call.prompts[index](), KvSource(Work.READ)
    elif call.ask is not None and not call.known:
        # every position is computed here for its log-probabilities, whatever KV the router or a pool has
        prompt, kv_source = await call.prompts[index](), KvSource()
    else:
        if params is not None and len(call.prompts) > 1:
            # a ticket is for one prompt: each prompt asks the offer's nodes for its own
            params = KvTransferParams(do_remote_prefill=params.do_remote_prefill, offer=params.offer)
        known = call.known[index] if call.known else None
        prompt, kv_source = await choose_kv_source(state, params, call.prompts[index], salt, known)
    names, steps = call.names, NO_STEPS
    if names is not None:
        given = params.prompt_steps if params is not None else None
        steps = names.steps or given_steps(given or (), len(prompt), state.ready.block_size)
    if not prompt:
        raise InvalidRequest("the prompt has no tokens; at least one is required", call.prompt_field)
    priority = body.priority or 0 if state.config.scheduler.priorities else 0
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        client_request_id=caller.request_id,
        prompt=prompt,
        sampling=_sampling(state, call, len(prompt)),
        text=text_options(body, call.parser, call.parser_options),
        priority=priority - call.goes_on,  # a cut stream goes on before others of its priority begin
        salt=salt,
        kv_source=kv_source,
        group=caller.group,
        drawn_seed=(caller.drawn_seed + index) % (1 << 63),
        known=call.known[index] if call.known else None,
        charge=caller.charge,
        prefill_charge=caller.prefill_charge,
        passed_on=caller.passed_on,
        steps=steps,
        ask=None if call.is_prefill_leg else call.ask,
    )


async def _grammar(state: NodeState, caller: Caller, call: _Call) -> str:
    """The grammar of the answers, "" for none: that of the body, or on a prefill leg the one that D sent."""
    params = call.body.kv_transfer_params
    if call.is_prefill_leg and params is not None and params.sampling is not msgspec.UNSET:
        grammar = decode_sampling(bytes(params.sampling)).grammar
        if grammar:
            await state.grammar_checks.check(grammar, SAMPLING_PARAM, caller.client)
        return grammar
    return await state.grammar_checks.grammar(await call.source(), len(call.prompts), caller.client)


def _sampling(state: NodeState, call: _Call, num_prompt_tokens: int) -> SamplingParams:
    """The validated sampling parameters. A prefill leg samples one token, with the parameters of D if D sent them."""
    max_model_len = state.ready.max_model_len
    check_room_for_output(num_prompt_tokens, max_model_len, call.prompt_field)
    body, params = call.body, call.body.kv_transfer_params
    if call.is_prefill_leg and params is not None and params.sampling is not msgspec.UNSET:
        sampling = msgspec.structs.replace(decode_sampling(bytes(params.sampling)), max_tokens=1)
        check_logits_args(sampling.logits_args, state.config.model.logits_stages, 1)
    else:
        if call.is_prefill_leg or call.is_read:
            body = msgspec.structs.replace(body, max_tokens=1, max_completion_tokens=None)
        sampling = sampling_params(
            body,
            state.defaults,
            logprobs=call.logprobs,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=max_model_len,
            default_max_tokens=call.default_max_tokens,
            cuts_limit=call.cuts_limit,
            grammar=call.grammar,
            bad_words=call.bad_words,
        )
        sampling = with_beams(sampling, body)
    sampling.validate(state.tokenizer.vocab_size)
    if not (call.is_prefill_leg or call.is_read):
        check_min_tokens(sampling)
    return sampling
