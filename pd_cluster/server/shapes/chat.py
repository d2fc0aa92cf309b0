"""/v1/chat/completions: what a body asks for, and the shape of answers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from pd_cluster.errors import InvalidRequest
from pd_cluster.protocol.messages import FinishReason
from pd_cluster.protocol.sampling_params import MAX_TOP_LOGPROBS
from pd_cluster.server.bodies.reasoning_options import reasoning_options
from pd_cluster.server.bodies.schema import ChatBody
from pd_cluster.server.bodies.tool_use import tool_use
from pd_cluster.server.grammar.grammar_source import chat_grammar_source, check_format, parser_options
from pd_cluster.server.params.sampling import sampling_params, text_options
from pd_cluster.server.requests.answer_extras import more_fields
from pd_cluster.server.requests.generation_ask import GenerationAsk
from pd_cluster.server.requests.logprobs import chat_logprobs
from pd_cluster.server.requests.prompt_scores import PromptAsk
from pd_cluster.server.requests.prompt_space import space_of
from pd_cluster.server.requests.prompt_steps import names_for
from pd_cluster.server.requests.request_checks import decoded
from pd_cluster.server.shapes.chunked_shape import ChunkedShape
from pd_cluster.server.tools.output_parser import Reasoning, ToolCall
from pd_http.json_pieces import JsonList, json_pieces
from pd_http.left_out import EMPTY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pd_cluster.server.bodies.schema import TokenizeBody
    from pd_cluster.server.node.caller import Caller
    from pd_cluster.server.requests.answer_extras import AnswerExtras
    from pd_cluster.server.requests.answer_task import CountedReply
    from pd_cluster.server.requests.choice import ChoiceOutput
    from pd_cluster.server.requests.response_shape import ResponseShape
    from pd_cluster.server.state import NodeState
    from pd_cluster.server.tools.output_parser import Part
    from pd_http.left_out import Kind


def chat_ask(
    state: NodeState,
    caller: Caller,
    reply: CountedReply,
    raw: bytes,
    shape: Callable[[AnswerExtras], ResponseShape],
    left_out: Mapping[str, Kind] = EMPTY,
) -> GenerationAsk:
    """What the chat body `raw` asks for. `left_out`: what of the client's own body is not in it. Raises PdError."""
    body = decoded(state, reply, raw, ChatBody, left_out, offer=caller.offer)
    logprobs = chat_num_logprobs(body)
    use = tool_use(body, reply.dialect.tool_limits)
    check_format(use, state.tool_format, has_parser=state.output_parser is not None)
    messages, options = body.messages, reasoning_options(body) | template_options(body)
    params = body.kv_transfer_params
    # A stream that goes on after midnight has the prompt of the day on which it began
    began_s = None if params is None or params.continuation is None else params.continuation.head.created
    template = state.tokenizer.chat_template
    is_named = not template.writes_time and (began_s is None or not template.writes_date)
    space = space_of(state.adapters, body)
    names = names_for(state, space, raw) if is_named else None
    max_model_len = state.ready.max_model_len
    tokenize = partial(
        state.tokenizer.encode_chat,
        messages,
        use.shown,
        options,
        max_tokens=max_model_len,
        add_special_tokens=bool(body.add_special_tokens),
        note=None if names is None else lambda encoded: names.name_text(encoded, template.written_contents(messages)),
        at_s=began_s,
        refuses=body.truncate_prompt_tokens is None,
        last=body.truncate_prompt_tokens,
    )
    sampling = partial(
        sampling_params,
        body,
        state.defaults,
        logprobs=logprobs,
        max_model_len=max_model_len,
        vocab_size=state.tokenizer.vocab_size,
        cuts_limit=reply.dialect.requires_limit,
    )
    return GenerationAsk(
        body=body,
        space=space,
        prompts=[tokenize],
        prompt_field="messages",
        form=partial(chat_grammar_source, body, use, state.tool_format, state.tokenizer, options),
        sampling=sampling,
        text=partial(text_options, body, state.output_parser, parser_options(body, use)),
        shape=shape,
        with_logprobs=logprobs is not None,
        echo_ids=True,
        names=names,
        scores=PromptAsk.of(body.prompt_logprobs, None, names_are_ids=False),
        prediction=None if body.prediction is None else body.prediction.text,
    )


def chat_num_logprobs(body: ChatBody) -> int | None:
    """The number of alternatives for each token; None for no logprobs. Raises InvalidRequest."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    number = (body.top_logprobs or 0) if body.logprobs else None
    if number is not None and not 0 <= number <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, not {number}", "top_logprobs")
    return number


def template_options(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """The arguments of the chat template beside messages and tools. Raises InvalidRequest."""
    add = body.add_generation_prompt is not False
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest("continue_final_message excludes add_generation_prompt: true", "continue_final_message")
    options = dict(body.chat_template_kwargs or {})
    if reserved := options.keys() & {"tokenize", "chat_template", "conversation", "tools", "return_tensors"}:
        raise InvalidRequest(f"chat_template_kwargs must not contain {sorted(reserved)[0]}", "chat_template_kwargs")
    if body.continue_final_message:
        return options | {"add_generation_prompt": False, "continue_final_message": True}
    return options | {"add_generation_prompt": add}


class ChatShape(ChunkedShape):
    """`chat.completion` and its chunks."""

    def __init__(self, extras: AnswerExtras) -> None:
        super().__init__(extras, "chatcmpl", "chat.completion.chunk", "delta")
        self._started: set[int] = set()  # choices that have sent their role
        self._calling: set[int] = set()  # choices with a tool call

    def chunk(self, index: int, output: ChoiceOutput, usage: dict[str, Any] | None = None) -> bytes:
        events = []
        after = self._after if usage is None else b'}],"usage":%s}\n\n' % orjson.dumps(usage)
        if index not in self._started:
            self._started.add(index)
            prompt = more_fields(self._extras.prompt_fields(index))  # a field of the chunk, not of the choice
            events.append(self._event(index, b'{"role":"assistant","content":""}', b"}]" + prompt + after[2:]))
        show_logprobs = self._extras.with_logprobs and output.tokens
        ids = self._extras.output_ids(output.tokens) if output.tokens else {}
        if output.parts or show_logprobs or ids:
            delta = _message(output.parts)
            if "tool_calls" in delta:
                self._calling.add(index)
            shown = json_pieces(self._logprobs(output) if output.tokens else None)
            logprobs = b"".join(shown) + more_fields(ids)
            events.append(self._event(index, orjson.dumps(delta), after, logprobs))
        if output.finish_reason is not None:
            reason = _finish_reason(output, has_calls=index in self._calling)
            end = b'%s,"stop_reason":%s' % (orjson.dumps(reason), orjson.dumps(output.stop_reason))
            events.append(self._event(index, b"{}", after, finish_reason=end))
        return b"".join(events)

    def body(self, choices: Sequence[ChoiceOutput], usage: dict[str, Any]) -> dict[str, Any]:
        shapes = map(self._choice, range(len(choices)), choices)
        shaped = JsonList(shapes) if len(choices) > 1 else [*shapes]
        more = self._extras.prompt_fields(0)
        return self._head | {"object": "chat.completion", "choices": shaped, "usage": usage} | more

    def _choice(self, index: int, choice: ChoiceOutput) -> dict[str, Any]:
        said = _message(choice.parts)
        calls = said.get("tool_calls", ())
        for call in calls:
            del call["index"]  # the calls of a whole message are in order
        return self._extras.output_ids(choice.tokens) | {
            "index": index,
            "message": {"role": "assistant", "content": None, "refusal": None} | said,
            "logprobs": self._logprobs(choice),
            "finish_reason": _finish_reason(choice, has_calls=bool(calls)),
            "stop_reason": choice.stop_reason,
        }

    def _logprobs(self, output: ChoiceOutput) -> dict[str, Any] | None:
        extras = self._extras
        if not extras.with_logprobs:
            return None
        return chat_logprobs(extras.vocabulary, output.tokens, names_are_ids=extras.names_are_ids)

    def _event(
        self, index: int, delta: bytes, after: bytes, logprobs: bytes = b"null", finish_reason: bytes = b"null"
    ) -> bytes:
        rest = b'%s,"logprobs":%s,"finish_reason":%s%s' % (delta, logprobs, finish_reason, after)
        return self._before % index + rest


def _message(parts: Sequence[Part]) -> dict[str, Any]:
    """The fields of a message, or of a chunk's delta, that hold these parts. `content` may be left out or empty."""
    content = [part for part in parts if isinstance(part, str)]
    if len(content) == len(parts):
        return {"content": "".join(content)}
    message: dict[str, Any] = {"content": "".join(content)} if content else {}
    if reasoning := [part.text for part in parts if isinstance(part, Reasoning)]:
        # vLLM's newer name, and the one of DeepSeek that most clients read
        message["reasoning"] = message["reasoning_content"] = "".join(reasoning)
    if calls := _tool_calls(part for part in parts if isinstance(part, ToolCall)):
        message["tool_calls"] = calls
    return message


def _tool_calls(pieces: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """One entry per call; only the entry with the first piece of a call has its id and name."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
        if piece.name:
            call |= {"id": piece.id, "type": "function"}
            call["function"]["name"] = piece.name
        call["function"]["arguments"] += piece.arguments
    return list(calls.values())


def _finish_reason(output: ChoiceOutput, *, has_calls: bool) -> str | None:
    """OpenAI's word. A choice that was cut off is "length", even inside a tool call; "stop" if it ended inside one."""
    is_called = has_calls and not output.has_cut_call and output.finish_reason is FinishReason.STOP
    return "tool_calls" if is_called else output.finish_reason
