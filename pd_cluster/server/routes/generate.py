"""The work of what is generated, or read, here: prompts become requests of the engine, and these an answer."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from pd_cluster.server.params.beam_fields import check_beam_choice
from pd_cluster.server.params.sampling import check_num_tokens, check_room_for_output
from pd_cluster.server.requests.continuation import check_prompts
from pd_cluster.server.requests.generation_request import GenerationRequest
from pd_cluster.server.requests.predicted_tokens import PredictedTokens
from pd_cluster.server.requests.prompt_steps import NO_STEPS, given_steps
from pd_cluster.server.requests.request_checks import check_amounts, name_ignored
from pd_cluster.server.requests.takeover_policy import choose_kv_source
from pd_cluster.server.shapes.response import answer
from pd_http.left_out import LeftOut

if TYPE_CHECKING:
    from pd_cluster.server.node.caller import Caller
    from pd_cluster.server.requests.answer_task import CountedReply
    from pd_cluster.server.requests.generation_ask import GenerationAsk
    from pd_cluster.server.state import NodeState


async def generate(state: NodeState, caller: Caller, reply: CountedReply, ask: GenerationAsk) -> None:
    """Answer `ask` through `reply`. Raises PdError."""
    requests = await prepare(state, caller, ask)
    if reply.dialect.requires_limit and requests[0].sampling.max_tokens < (ask.body.max_tokens or 0):
        name_ignored(state, reply, LeftOut(max_tokens="field"))
    if ask.params.continuation is not None:
        check_prompts(ask.params.continuation, requests)
    if ask.scores is not None:
        ask.scores.check_length(sum(len(one.prompt) * one.num_choices for one in requests))
        num_bytes = ask.scores.num_bytes([len(one.prompt) for one in requests], ask.body.stream)
        await reply.share.plan(num_bytes, ask.scores.param)
    if (predicted := requests[0].predicted) is not None:
        reply.share.grow(len(predicted.token_ids) * (52 + requests[0].num_choices))  # ids and places; marks
    await answer(state, caller, reply, ask, requests)


async def prepare(state: NodeState, caller: Caller, ask: GenerationAsk) -> list[GenerationRequest]:
    """The requests of the prompts, in order. Raises PdError."""
    body, requests = ask.body, list[GenerationRequest]()
    check_amounts(state, body, len(ask.prompts))
    predicted = None if ask.prediction is None else await _predicted(state, ask, ask.prediction)
    bad_words = await state.tokenizer.encode_words(body.bad_words) if body.bad_words else ()
    form, grammar = await ask.form(), ""
    if form is not None:
        grammar = await state.grammar_checks.grammar(form, len(ask.prompts), caller.client)
    if body.use_beam_search:
        check_beam_choice(grammar, state.config.model.logits_stages)
    priority = body.priority or 0 if state.config.scheduler.priorities else 0
    for index in range(len(ask.prompts)):
        prompt, kv_source = await choose_kv_source(state, ask, index)
        steps = NO_STEPS
        if ask.names is not None:
            given = ask.params.prompt_steps or ()
            steps = ask.names.steps or given_steps(given, len(prompt), state.ready.block_size)
        check_room_for_output(len(prompt), state.ready.max_model_len, ask.prompt_field)
        one = GenerationRequest(
            request_id=uuid.uuid4().hex,
            client_request_id=caller.request_id,
            prompt=prompt,
            sampling=ask.sampling(len(prompt), grammar, bad_words),
            text=ask.text(),
            priority=priority - ask.goes_on,  # a cut stream goes on before others of its priority begin
            space=ask.space,
            kv_source=kv_source,
            group=caller.group,
            drawn_seed=(caller.drawn_seed + index) % (1 << 63),
            known=ask.known[index] if ask.known else None,
            charge=caller.charge,
            prefill_charge=caller.prefill_charge,
            passed_on=caller.passed_on,
            steps=steps,
            ask=ask.scores,
            predicted=predicted,
        )
        requests.append(one)
    return requests


async def _predicted(state: NodeState, ask: GenerationAsk, text: str) -> PredictedTokens | None:
    """None: the answer is written by another node. Raises InvalidRequest."""
    most = state.ready.max_model_len
    if ask.kv_source is not None:
        state.tokenizer.check_length(text, most, "prediction")
        return None
    token_ids = await state.tokenizer.encode_answer(text, max_tokens=most, param="prediction")
    check_num_tokens(len(token_ids), most, "prediction")
    return await asyncio.to_thread(PredictedTokens, token_ids)
