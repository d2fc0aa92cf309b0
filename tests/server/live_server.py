"""A real uvicorn in the test's own event loop, on a port that the OS chose."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import uvicorn
from transformers import AutoTokenizer

import pd_cluster
from pd_cluster.config import (
    HandoffConfig,
    LoraConfig,
    ModelConfig,
    NodeConfig,
    NodeHttpLimits,
    SchedulerConfig,
    ServerConfig,
)
from pd_cluster.launch.http_server import FILES_PER_REQUEST
from pd_cluster.server.app import create_app
from pd_cluster.server.node.metrics import NodeMetrics
from pd_cluster.server.state import NodeState
from pd_cluster.server.text.tokenizer import Tokenizer
from pd_http.protocol import BoundedProtocol
from tests.in_loop_server import in_loop
from tests.server import shared_routes

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

    from pd_http.limits import HttpLimits
    from tests.server.fake_engine import FakeEngine

KEY = b"k" * 32
MODEL_DIR = Path(pd_cluster.__file__).parent / "demo_model"
NUM_FILES = 4096

shared_routes.share()


@functools.cache
def _hugging_face() -> Any:
    return AutoTokenizer.from_pretrained(str(MODEL_DIR))


def demo_tokenizer() -> Tokenizer:
    """The demo model's, with a thread of its own; the vocabulary is read from disk once."""
    return Tokenizer(_hugging_face())


def make_state(
    engine: FakeEngine,
    *,
    role: str = "mixed",
    node_id: str = "node",
    handoff: HandoffConfig | None = None,
    model_name: str = "demo",
    metrics_names: str = "pd",
    speculation: str = "none",
    lora: LoraConfig | None = None,
) -> NodeState:
    config = NodeConfig(
        model=ModelConfig(model=str(MODEL_DIR), served_model_name=(model_name,)),
        server=ServerConfig(role=role, node_id=node_id, metrics_names=metrics_names),
        handoff=handoff or HandoffConfig(),
        scheduler=SchedulerConfig(speculation=speculation),
        lora=lora or LoraConfig(),
    )
    return NodeState(config=config, engine=engine, tokenizer=demo_tokenizer(), key=KEY)


@dataclass(frozen=True)
class Served:
    url: str
    uvicorn: uvicorn.Server


class Node:
    """A running node: its address, its state, and a client session."""

    def __init__(self, server: Served, state: NodeState, engine: FakeEngine, session: aiohttp.ClientSession) -> None:
        self.url = server.url
        self._server = server
        self.state = state
        self.engine = engine
        self.session = session

    def http_tasks(self) -> list[asyncio.Task[None]]:
        """uvicorn's tasks of the requests being answered."""
        return list(self._server.uvicorn.server_state.tasks)

    def metric(self, line: str) -> float:
        """The value of one sample of /metrics, named as there; 0 when it is missing."""
        name, _, labels = line.partition("{")
        return self.state.metrics.registry.get_sample_value(name, dict(re.findall(r'(\w+)="([^"]*)"', labels))) or 0.0


@contextlib.asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """The app's URL while it is served."""
    async with _served(app, NodeMetrics(), NodeHttpLimits()) as server:
        yield server.url


@contextlib.asynccontextmanager
async def _served(app: FastAPI, metrics: NodeMetrics, limits: HttpLimits) -> AsyncIterator[Served]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    gate, context = metrics.http.make_gate(limits, NUM_FILES, FILES_PER_REQUEST), limits.server_context()
    protocol = gate.protocol if context is None else gate.handshake_of(BoundedProtocol, context)
    config = uvicorn.Config(app, http=protocol, log_config=None, lifespan="on", timeout_graceful_shutdown=5)
    async with in_loop(config, listener) as server:
        yield Served(f"{limits.scheme}://127.0.0.1:{port}", server)


@contextlib.asynccontextmanager
async def running(
    engine: FakeEngine,
    *,
    node_id: str = "node",
    handoff: HandoffConfig | None = None,
    model_name: str = "demo",
    limits: HttpLimits | None = None,
    metrics_names: str = "pd",
    speculation: str = "none",
    lora: LoraConfig | None = None,
) -> AsyncIterator[Node]:
    """A node over `engine`."""
    state = make_state(
        engine, node_id=node_id, handoff=handoff, model_name=model_name, metrics_names=metrics_names,
        speculation=speculation, lora=lora,
    )  # fmt: skip
    async with (
        _served(create_app(state), state.metrics, limits or NodeHttpLimits()) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Node(server, state, engine, session)
    await engine.close()
