"""What a node can tell from the moment at which it is ready: its engine's statistics come with the ready message."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

import pd_cluster
from pd_cluster.config import CacheConfig, HandoffConfig, ModelConfig, NodeConfig
from pd_cluster.engine.process import spawn_engine
from pd_cluster.protocol.messages import EngineReady, EngineStats, FromEngine
from tests.cluster import READY_DEADLINE_S
from tests.fork_server import SHARED_ENV
from tests.worker.forked_ranks import fork_rank

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def from_engine(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(f"ipc://{tmp_path}/e.out")
        yield socket


@pytest.mark.integration
@pytest.mark.timeout(READY_DEADLINE_S)
def test_statistics_come_with_the_ready_message(tmp_path: Path, from_engine: zmq.Socket[bytes]) -> None:
    """Else /kv and /metrics of a node that has said that it is ready may lack its blocks and its queues.

    The engine is forked where workers share a server: tests/launch/test_hub_model.py keeps the real command.
    """
    model = ModelConfig(model=str(Path(pd_cluster.__file__).parent / "demo_model"), device="cpu", num_threads=1)
    config = NodeConfig(model=model, cache=CacheConfig(num_blocks=8), handoff=HandoffConfig(connector="none"))
    address = f"ipc://{tmp_path}/e"
    process: Any
    if SHARED_ENV in os.environ:
        process = fork_rank("pd_cluster.engine.process", config, address)
    else:
        process = spawn_engine(config, address)
    try:
        kinds: list[type] = []
        while EngineReady not in kinds:
            assert from_engine.poll(int(READY_DEADLINE_S * 1000))
            kinds = [type(one) for one in msgspec.msgpack.decode(from_engine.recv(), type=list[FromEngine])]
        assert EngineStats in kinds[kinds.index(EngineReady) :]
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
