"""What is checked of a request before its prompts are tokenized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pd_cluster.errors import EngineUnavailable, InvalidRequest, Overloaded
from pd_cluster.scheduling.turns import crowd_limit
from pd_cluster.server.bodies.fields import ignored_header
from pd_cluster.server.bodies.reasoning_options import unread_reasoning_fields
from pd_cluster.server.bodies.schema import (
    LISTS,
    MAX_LISTED_TOKENS,
    MAX_LOGITS_ARGS_BYTES,
    ChatBody,
    GenerationBody,
    KvTransferParams,
    PromptFields,
    decode_body,
)
from pd_cluster.server.bodies.tool_use import choice_of, leave_out_tools
from pd_cluster.server.node.request_id import MAX_REQUEST_ID_CHARS, is_request_id
from pd_cluster.server.params.beam_fields import check_beam_fields, unread_beam_fields
from pd_cluster.server.params.sampling import check_room_for_output
from pd_cluster.server.text.normal_messages import normal_messages
from pd_http.left_out import EMPTY, LeftOut
from pd_http.member_bounds import too_many

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pd_cluster.server.requests.answer_task import CountedReply
    from pd_cluster.server.state import NodeState
    from pd_http.left_out import Kind

Fields = TypeVar("Fields", bound=PromptFields)
MAX_BAD_WORD_CHARS = 4096  # of all words together


def check_stream_options(body: GenerationBody) -> None:
    """Raises InvalidRequest for options that only a stream has."""
    options = body.stream_options
    if options is not None and not body.stream and not (options.include_timings and options.include_usage is None):
        raise InvalidRequest("stream_options needs stream: true", "stream_options")


def check_best_of(body: GenerationBody) -> None:
    """Raises InvalidRequest unless best_of is absent, equals n, or is the width of a beam search."""
    if body.best_of is not None and body.best_of != (body.n or 1) and not body.use_beam_search:
        raise InvalidRequest(
            "best_of must equal n: sequences are not ranked without use_beam_search", "best_of", "unsupported_value"
        )


def check_prompt_and_tokens(body: GenerationBody) -> None:
    """Raises InvalidRequest for values of fields that `SamplingParams.validate` does not see."""
    if body.allowed_token_ids is not None and not body.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids must not be empty: no token could be generated", "allowed_token_ids")
    words = body.bad_words or ()
    if any(not word.strip() for word in words):
        raise InvalidRequest("bad_words must not contain an empty or blank string", "bad_words")
    if sum(map(len, words)) > MAX_BAD_WORD_CHARS:
        raise InvalidRequest(f"bad_words may have at most {MAX_BAD_WORD_CHARS} characters in all", "bad_words")


def check_prompt_fields(body: PromptFields) -> None:
    """Raises InvalidRequest."""
    if body.truncate_prompt_tokens is not None and body.truncate_prompt_tokens < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at least 1, not {body.truncate_prompt_tokens}: the prompt's last tokens "
            "are kept",
            "truncate_prompt_tokens",
        )
    for name in ("request_id", "rid"):
        if (given := getattr(body, name)) is not None and not is_request_id(given):
            raise InvalidRequest(f"{name} must have 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters", name)
    if not -(1 << 31) <= (body.priority or 0) < 1 << 31:
        raise InvalidRequest(f"priority must fit into 32 bits, not {body.priority}", "priority")


def check_number(body: GenerationBody) -> None:
    """Raises InvalidRequest for n out of range."""
    if body.n is not None and not 1 <= body.n <= 128:
        raise InvalidRequest(f"n must be between 1 and 128, not {body.n}", "n")


CHECKS: tuple[Callable[[GenerationBody], None], ...] = (  # of the body alone, in the order of their errors
    check_stream_options,
    check_best_of,
    check_beam_fields,
    check_prompt_and_tokens,
    check_prompt_fields,
    check_number,
)


def check_amounts(state: NodeState, body: GenerationBody, num_prompts: int) -> None:
    """Refuse what is too much for the engine, all prompts together, before it has taken some of them.

    Of the room in its queue the engine decides: its statistics may be 0.1 s old. Raises InvalidRequest, Overloaded.
    """
    for name in LISTS:
        num_listed = len(getattr(body, name) or ())
        if num_listed * num_prompts > MAX_LISTED_TOKENS:
            raise InvalidRequest(
                f"{name} lists {num_listed} tokens for each of {num_prompts} prompts; "
                f"{MAX_LISTED_TOKENS} are allowed in all",
                name,
            )
    check_logits_args(body.logits_args, state.config.model.logits_stages, num_prompts)
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


def check_logits_args(args: dict[str, Any] | None, logits_stages: Sequence[str], num_prompts: int) -> None:
    """Raises InvalidRequest for arguments that no stage of this node reads, or that take too much of the engine."""
    if not args:
        return
    if not logits_stages:
        raise InvalidRequest("logits_args: this node has no --logits-stage that reads them", "logits_args")
    try:
        num_bytes = len(msgspec.msgpack.encode(args)) * num_prompts
    except OverflowError as error:
        raise InvalidRequest("logits_args: an integer does not fit into 64 bits", "logits_args") from error
    if num_bytes > MAX_LOGITS_ARGS_BYTES:
        raise InvalidRequest(
            f"logits_args has {num_bytes} bytes, for {num_prompts} prompts; {MAX_LOGITS_ARGS_BYTES} are allowed",
            "logits_args",
        )


def disabled_fields(state: NodeState, body: PromptFields) -> set[str]:
    """Fields of the request that this node's settings, or its chat template, disable."""
    names = {"priority"} if body.priority and not state.config.scheduler.priorities else set()
    if isinstance(body, GenerationBody):
        names |= unread_beam_fields(body)
    if not isinstance(body, ChatBody):
        return names
    template = state.tokenizer.chat_template
    if body.tools and choice_of(body.tool_choice) != "none" and not template.writes_tools:
        names.add("tools")
    return names | unread_reasoning_fields(body, template.texts)


def check_room_for_prompt(num_tokens: int, max_model_len: int, param: str) -> None:
    """Raises InvalidRequest for a prompt without tokens, and for one that the engine cannot read."""
    if not num_tokens:
        raise InvalidRequest(f"{param} has a text without tokens; at least one is required", param)
    check_room_for_output(num_tokens, max_model_len, param)


def name_ignored(state: NodeState, reply: CountedReply, ignored: LeftOut) -> None:
    """Count these names, and add them to those that the header of the answer has."""
    state.metrics.count_left_out(ignored)
    reply.headers |= ignored_header(ignored, reply.headers)


def decoded(
    state: NodeState,
    reply: CountedReply,
    raw: bytes,
    kind: type[Fields],
    left_out: Mapping[str, Kind] = EMPTY,
    offer: str = "",
) -> Fields:
    """The body, for a model that this node serves. A header of the answer names what is ignored. Raises PdError.

    Messages of a chat are in normal form. `left_out`: what of the client's own body is not in this one. `offer`: of
    the request's headers, see `Caller`.
    """
    if state.draining:
        raise EngineUnavailable("this node is shutting down")
    body, unread = decode_body(raw, kind)
    is_routed = bool(offer) or (isinstance(body, GenerationBody) and body.kv_transfer_params is not None)
    state.check_model(body.model, is_routed=is_routed)
    state.metrics.unknown_fields.inc(len(unread))
    params = reply.dialect.params
    disabled = {params.get(name, name) for name in disabled_fields(state, body)}
    ignored = LeftOut(left_out)
    for name in unread | disabled:
        ignored.add("field", name)
    if isinstance(body, ChatBody):
        if len(body.messages) > state.ready.max_model_len:  # each has a token
            raise too_many("messages", len(body.messages), "entries", state.ready.max_model_len, "messages")
        for name in leave_out_tools(body):
            ignored.add("tool", name)
        body.messages = normal_messages(body.messages, ignored)
    state.metrics.count_left_out(ignored)
    reply.headers |= ignored_header(ignored)
    if offer and isinstance(body, GenerationBody):
        body.kv_transfer_params = KvTransferParams(do_remote_prefill=True, offer=offer)
    return body
