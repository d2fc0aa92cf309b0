"""What load balancers, benchmark tools and dashboards of vLLM and SGLang ask a node about itself."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import Response  # noqa: TC002 (FastAPI reads the annotation)

from pd_cluster import __version__
from pd_cluster.errors import EngineUnavailable
from pd_cluster.models.model_task import GENERATE
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.generation_request import GenerationRequest
from pd_cluster.server.generation_stream import GenerationStream
from pd_cluster.server.meta_routes import health_report
from pd_cluster.server.response import collect
from pd_cluster.server.sampling import TextOptions
from pd_http.held_bytes import Share
from pd_http.reply import json_response

if TYPE_CHECKING:
    from pd_cluster.server.state import NodeState

PROBE_DEADLINE_S = 10.0  # of the token of /health_generate; less than a router waits for small answers


def status_routes(state: NodeState) -> APIRouter:
    """The routes of this module for the node of `state`."""
    routes = APIRouter()

    @routes.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @routes.get("/load")
    async def load() -> Response:
        return json_response({"server_load": state.num_in_flight})

    @routes.get("/ping")
    @routes.post("/ping")
    async def ping() -> Response:
        return _health(state)

    @routes.get("/health_generate")
    async def health_generate() -> Response:
        await _generate_one_token(state)
        return _health(state)

    @routes.get("/server_info")
    @routes.get("/get_server_info")
    async def server_info() -> Response:
        return json_response(_server_info(state))

    @routes.get("/get_model_info")
    async def model_info() -> Response:
        name = state.model_name  # not the path of the files, which clients must not learn
        return json_response({"model_path": name, "tokenizer_path": name, "is_generation": state.task.name == GENERATE})

    return routes


def _health(state: NodeState) -> Response:
    body = health_report(state)
    return json_response(body, 200 if body["status"] == "ok" else 503)


def _server_info(state: NodeState) -> dict[str, Any]:
    """Without paths, addresses and keys: every client may ask."""
    ready, config = state.ready, state.config
    return {
        "version": __version__,
        "role": state.role.name,
        "node_id": state.node_id,
        "served_model_name": list(state.model_names),
        "max_model_len": ready.max_model_len,
        "max_num_seqs": ready.max_num_seqs,
        "num_blocks": ready.num_blocks,
        "block_size": ready.block_size,
        "connector": ready.connector,
        "prefix_caching": config.cache.prefix_caching,
    }


async def _generate_one_token(state: NodeState) -> None:
    """Raises EngineUnavailable, also when the token does not come in time."""
    request = GenerationRequest(
        request_id=uuid.uuid4().hex,
        client_request_id="health",
        prompt=[0],
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        text=TextOptions(),
    )
    try:
        async with asyncio.timeout(PROBE_DEADLINE_S), GenerationStream(state, request, time.monotonic()) as stream:
            await collect([stream], Share(state.held))
            await stream.settle()
    except TimeoutError as error:
        state.metrics.waits.labels("health_generate").inc()
        raise EngineUnavailable(f"no token was generated within {PROBE_DEADLINE_S:g} s") from error
