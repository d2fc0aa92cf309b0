"""The endpoints that generate nothing: models, tokenizer, health, metrics, KV state, lease release, OpenAPI."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from starlette.responses import Response

from pd_cluster.errors import InvalidRequest
from pd_cluster.protocol.messages import ReleaseLease
from pd_cluster.server.bodies.fields import ignored_header
from pd_cluster.server.bodies.reasoning_options import reasoning_options
from pd_cluster.server.bodies.schema import ChatBody, DetokenizeBody, ReleaseBody, TokenizeBody, decode_body
from pd_cluster.server.bodies.tool_use import tool_use
from pd_cluster.server.params.sampling import check_num_tokens, last_tokens
from pd_cluster.server.requests.request_checks import check_prompt_and_tokens
from pd_cluster.server.routes.openapi import openapi_document
from pd_cluster.server.routes.translated_body import translated
from pd_cluster.server.shapes.chat import template_options
from pd_cluster.server.text.normal_messages import normal_messages
from pd_connectors.protocol.errors import ProtocolMismatch, TicketError, TicketExpired
from pd_connectors.protocol.messages import PROTOCOL_VERSION
from pd_connectors.protocol.ticket import Ticket, verify
from pd_http.body import read_body
from pd_http.dialects import COUNT_TOKENS, dialect_of
from pd_http.left_out import LeftOut
from pd_http.member_bounds import check_members
from pd_http.metrics import EXPOSITION_TYPE
from pd_http.reply import json_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request

    from pd_cluster.server.state import NodeState

    Handler: TypeAlias = Callable[[NodeState, Request], Awaitable[Response]]


def meta_handlers() -> dict[str, Handler]:
    """What serves the endpoints of this module, by name."""
    document = openapi_document()

    async def openapi(_: NodeState, __: Request) -> Response:
        return json_response(document)

    return {
        "openapi": openapi,
        "models": _models,
        "model": _model,
        "health": health,
        "metrics": _metrics,
        "kv": _kv,
        "tokenize": _tokenize,
        "count_tokens": _count_tokens,
        "detokenize": _detokenize,
        "tokenizer_info": _tokenizer_info,
        "release": _release,
    }


async def _body(state: NodeState, request: Request) -> bytes:
    body = await read_body(request.scope, request.receive, state.max_body_bytes)
    await state.turns.take(len(body))
    check_members(body, dialect_of(request.url.path).bounds)
    return body


async def _models(state: NodeState, _: Request) -> Response:
    names = (*state.model_names, *(record.name for record in state.adapters.live))
    return json_response({"object": "list", "data": [_model_card(state, name) for name in names]})


async def _model(state: NodeState, request: Request) -> Response:
    name = request.path_params["name"]
    state.check_model(name)
    return json_response(_model_card(state, name))


def _model_card(state: NodeState, name: str) -> dict[str, Any]:
    ready, is_adapter = state.engine.ready, bool(state.adapters.digest_of(name))
    return {
        "id": name,
        "object": "model",
        "created": state.created_s,
        "owned_by": "pd-cluster",
        "root": name if is_adapter else state.model_name,  # not the path of the files, which clients must not learn
        "parent": state.model_name if is_adapter else None,
        "max_model_len": ready.max_model_len if ready else None,
    }


def slow_links(gauges: Mapping[str, float]) -> list[str]:
    """The links that the connector calls slow, each with its bandwidth."""
    labels = [name.partition("|")[2] for name, value in gauges.items() if name.startswith("kv_peer_slow|") and value]
    speeds = [(label, gauges.get(f"kv_peer_bytes_per_second|{label}", 0.0) / 1e9) for label in labels]
    return [f"KV comes from {label.split(',')[0].removeprefix('peer=')} at {gbps:.2g} GB/s" for label, gbps in speeds]


async def health(state: NodeState, _: Request) -> Response:
    """The state of the node; status 503 unless it is ok."""
    body = _health_report(state)
    return json_response(body, 200 if body["status"] == "ok" else 503)


def _health_report(state: NodeState) -> dict[str, Any]:
    ready, stats = state.engine.ready, state.engine.stats
    body: dict[str, Any] = {
        "status": _status(state),
        **state.role.report(),
        "node_id": state.node_id,
        "tp": state.config.model.tp,
        "model": state.model_name,
        "epoch": ready.epoch if ready else None,
        "max_num_seqs": ready.max_num_seqs if ready else None,
        "engine_id": ready.engine_id if ready else None,
        "num_in_flight": state.num_in_flight,
        "lora_slots": state.adapters.num_slots,
        "kv_in_use": round(stats.kv.in_use / stats.kv.num_blocks, 3) if stats else 0.0,
    }
    if stats and (slow := slow_links(stats.gauges)):
        body["slow_links"] = slow
    if state.engine.frozen:
        body["reason"] = state.engine.frozen
    if ready is not None:
        body |= {"fingerprint": ready.fingerprint, "connector": ready.connector, "max_model_len": ready.max_model_len}
        body["kv_protocol"] = PROTOCOL_VERSION
        body["stream_version"] = state.stream_version(ready)
    return body


def _status(state: NodeState) -> str:
    """One word; docs/internals.md says what each means (What counts as down)."""
    engine = state.engine
    if engine.ready is None or (engine.alive and not state.adapters.is_ready):
        return "starting"
    if not engine.alive:
        return "dead"
    if engine.frozen:
        return "frozen"
    return "draining" if state.draining else "ok"


async def _metrics(state: NodeState, _: Request) -> Response:
    names_vllm = state.config.server.metrics_names == "vllm"
    return Response(state.metrics.render(state.model_name if names_vllm else ""), media_type=EXPOSITION_TYPE)


async def _kv(state: NodeState, _: Request) -> Response:
    ready, stats = state.ready, state.engine.stats
    pool = msgspec.to_builtins(stats.kv) if stats else {"num_blocks": ready.num_blocks}
    return json_response(pool | {"block_size": ready.block_size, "epoch": ready.epoch, "engine_id": ready.engine_id})


async def _tokenizer_info(state: NodeState, _: Request) -> Response:
    return json_response(state.tokenizer.facts | {"model_max_length": state.ready.max_model_len})


async def _tokenize(state: NodeState, request: Request) -> Response:
    body, unread = decode_body(await _body(state, request), TokenizeBody)
    ignored = LeftOut(dict.fromkeys(unread, "field"))
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of prompt and messages is required", "prompt")
    limit = state.ready.max_model_len
    if body.messages is not None:
        ids = await state.tokenizer.encode_chat(
            normal_messages(body.messages, ignored),
            body.tools,
            template_options(body),
            max_tokens=limit,
            add_special_tokens=bool(body.add_special_tokens),
        )
    else:
        assert body.prompt is not None
        ids = await state.tokenizer.encode(
            body.prompt, max_tokens=limit, add_special_tokens=body.add_special_tokens is not False
        )
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": limit, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = await state.tokenizer.pieces(ids)
    return json_response(answer, headers=ignored_header(ignored))


async def _count_tokens(state: NodeState, request: Request) -> Response:
    one = translated(COUNT_TOKENS, await _body(state, request))
    body, unread = decode_body(one.chat, ChatBody)
    state.check_model(body.model)
    left_out = LeftOut(one.left_out)
    for name in unread:
        left_out.add("field", name)
    messages = normal_messages(body.messages, left_out)
    state.metrics.count_left_out(left_out)
    check_prompt_and_tokens(body)
    ids = await state.tokenizer.encode_chat(
        messages,
        tool_use(body, dialect_of(COUNT_TOKENS).tool_limits).shown,
        reasoning_options(body) | template_options(body),
        max_tokens=state.ready.max_model_len,
        add_special_tokens=bool(body.add_special_tokens),
    )
    return json_response({"input_tokens": len(last_tokens(ids, body))}, headers=ignored_header(left_out))


async def _detokenize(state: NodeState, request: Request) -> Response:
    body, ignored = decode_body(await _body(state, request), DetokenizeBody)
    state.check_model(body.model)
    check_num_tokens(len(body.tokens), state.ready.max_model_len, "tokens")
    limit = max(state.tokenizer.vocab_size, state.tokenizer.num_tokens)
    if any(not 0 <= token_id < limit for token_id in body.tokens):
        raise InvalidRequest(f"tokens must be in the vocabulary 0..{limit - 1}", "tokens")
    text = await state.tokenizer.decode(body.tokens, skip_special=bool(body.skip_special_tokens))
    return json_response({"prompt": text}, headers=ignored_header(ignored))


async def _release(state: NodeState, request: Request) -> Response:
    body, _ = decode_body(await _body(state, request), ReleaseBody)
    return json_response({"released": _released(state, body.ticket)})


def _released(state: NodeState, token: str) -> bool:
    """False when the lease is not, or no longer, this engine's."""
    try:
        ticket = verify(state.key, token, Ticket, time.time())
    except TicketExpired:
        return False  # its lease has expired too, unless a reader renews and later releases it
    except (TicketError, ProtocolMismatch) as error:
        raise InvalidRequest(str(error), "ticket", "bad_ticket") from error
    ready = state.ready
    if (ticket.lease.engine_id, ticket.lease.epoch) != (ready.engine_id, ready.epoch):
        return False
    state.engine.send(ReleaseLease(ticket.lease.lease_id))
    return True
