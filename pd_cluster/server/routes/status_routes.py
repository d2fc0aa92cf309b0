"""What load balancers, benchmark tools and dashboards of vLLM and SGLang ask a node about itself."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING

from pd_cluster import __version__
from pd_cluster.errors import EngineUnavailable
from pd_cluster.models.model_task import GENERATE
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.params.sampling import TextOptions
from pd_cluster.server.requests.generation_request import GenerationRequest
from pd_cluster.server.requests.generation_stream import GenerationStream
from pd_cluster.server.routes.meta_routes import health
from pd_cluster.server.shapes.response import collect
from pd_http.held_bytes import Share
from pd_http.reply import json_response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from pd_cluster.server.routes.meta_routes import Handler
    from pd_cluster.server.state import NodeState

PROBE_DEADLINE_S = 10.0  # of the token of /health_generate; less than a router waits for small answers


def status_handlers() -> dict[str, Handler]:
    """What serves the endpoints of this module, by name."""
    return {
        "version": _version,
        "load": _load,
        "health_generate": _health_generate,
        "server_info": _server_info,
        "model_info": _model_info,
    }


async def _version(_: NodeState, __: Request) -> Response:
    return json_response({"version": __version__})


async def _load(state: NodeState, _: Request) -> Response:
    return json_response({"server_load": state.num_in_flight})


async def _health_generate(state: NodeState, request: Request) -> Response:
    await _generate_one_token(state)
    return await health(state, request)


async def _model_info(state: NodeState, _: Request) -> Response:
    name = state.model_name  # not the path of the files, which clients must not learn
    return json_response({"model_path": name, "tokenizer_path": name, "is_generation": state.task.name == GENERATE})


async def _server_info(state: NodeState, _: Request) -> Response:
    """Without paths, addresses and keys: every client may ask."""
    ready, config = state.ready, state.config
    info = {
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
    return json_response(info)


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
