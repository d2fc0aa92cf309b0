"""The generating endpoints: from a body to what it asks for, and to the work that this is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pd_cluster.models.model_task import GENERATE
from pd_cluster.server.bodies.schema import CompletionBody
from pd_cluster.server.requests.continuation import known_answers
from pd_cluster.server.requests.request_checks import CHECKS, decoded
from pd_cluster.server.routes.generate import generate
from pd_cluster.server.routes.prefill_endpoint import prefill_leg
from pd_cluster.server.routes.translated_body import translated
from pd_cluster.server.shapes.chat import ChatShape, chat_ask
from pd_cluster.server.shapes.completions import completion_ask
from pd_cluster.server.shapes.messages_shape import MessagesShape
from pd_cluster.server.shapes.responses_shape import ResponsesShape
from pd_http.dialects import MESSAGES, RESPONSES

if TYPE_CHECKING:
    from pd_cluster.server.node.caller import Caller
    from pd_cluster.server.requests.answer_task import CountedReply
    from pd_cluster.server.requests.generation_ask import GenerationAsk
    from pd_cluster.server.state import NodeState


async def chat_completions(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/chat/completions`: generate for the body `raw`, and answer through `reply`. Raises PdError."""
    await _serve(state, caller, reply, chat_ask(state, caller, reply, raw, ChatShape))


async def messages(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/messages`, as a chat request. Raises PdError."""
    one = translated(MESSAGES, raw)
    await state.turns.take(len(one.chat))  # another one than for the translation
    await _serve(state, caller, reply, chat_ask(state, caller, reply, one.chat, MessagesShape, one.left_out))


async def responses(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/responses`, as a chat request. Raises PdError."""
    one = translated(RESPONSES, raw)
    await state.turns.take(len(one.chat))  # another one than for the translation
    shape = partial(ResponsesShape, one.given, one.calls)
    await _serve(state, caller, reply, chat_ask(state, caller, reply, one.chat, shape, one.left_out))


async def completions(state: NodeState, caller: Caller, reply: CountedReply, raw: bytes) -> None:
    """Serve `POST /v1/completions`: generate for the body `raw`, and answer through `reply`. Raises PdError."""
    body = decoded(state, reply, raw, CompletionBody, offer=caller.offer)
    await state.turns.take(len(raw))  # 2 million tokens take 0.1 s to here, and again after it
    await _serve(state, caller, reply, completion_ask(state, body, raw))


async def _serve(state: NodeState, caller: Caller, reply: CountedReply, ask: GenerationAsk) -> None:
    state.check_task(GENERATE, "generated answers")
    body, continuation = ask.body, ask.params.continuation
    for check in CHECKS:
        check(body)
    caller = replace(caller, request_id=body.request_id or body.rid or caller.request_id)
    if continuation is not None:
        version, vocab_size = state.stream_version(state.ready), state.tokenizer.vocab_size
        known = known_answers(continuation, body, version, vocab_size=vocab_size, num_prompts=len(ask.prompts))
        head, ask = continuation.head, replace(ask, known=known)
        caller = replace(caller, request_id=head.response_id, drawn_seed=head.seed)
    await (prefill_leg if ask.params.do_remote_decode else generate)(state, caller, reply, ask)
