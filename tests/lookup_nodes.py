"""Nodes in the loop of a test of which some draft by lookup. Each has a worker of its own; KV goes from one to another.

    with workers("p", "d0", "d1") as found:          # once for a file: a worker takes a second
        async with running(found, {"d0"}) as nodes:  # P hands over; of two D one drafts
            await nodes["d0"].ask(CHAT, body)

The drafter is the product's. Its indexes are there at once, and its drafts are weighed by fixed prices: both would
depend on the speed of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import pytest

from pd_cluster.config import CacheConfig, HandoffConfig, NodeConfig, SchedulerConfig, ServerConfig
from pd_cluster.server.app import create_app
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_connectors.base import ConnectorContext
from pd_connectors.loopback import LoopbackNetwork
from pd_connectors.registry import create_connector
from pd_http.frames import Frame
from tests.cut_streams import Ask, Said, asking
from tests.drafters import lookup_drafter
from tests.engine.test_core_pipeline import CONFIG
from tests.in_loop_engine import InLoopEngine
from tests.one_process import STOPPED_S, patient
from tests.patient_masks import be_patient
from tests.router.router_process import KEY
from tests.server.cut_nodes import tool_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence

    from fastapi import FastAPI

    from pd_connectors.base import Connector
    from pd_http.frames import AnyFrame

Worker = tuple[DeviceExecutor, "Connector"]


@dataclass(frozen=True)
class LookupNode:
    """Its app runs without a lifespan; the engine turns while the block of `running` lasts."""

    engine: InLoopEngine
    app: FastAPI

    @property
    def ask(self) -> Ask:
        """Asks it for frames."""
        return asking(self.app)

    @property
    def num_accepted(self) -> int:
        """Drafts so far; of a node that does not draft none."""
        drafting = self.engine._core._scheduler._drafting
        return int(drafting.counters["spec_decode_num_accepted_tokens_total"]) if drafting else 0

    @property
    def num_continued(self) -> int:
        """Streams that came with tokens of another node."""
        return sum(bool(request.known) for request in self.engine.requests)


@contextlib.contextmanager
def workers(*names: str) -> Iterator[dict[str, Worker]]:
    """One of each name, with the shallow demo model."""
    network, found = LoopbackNetwork(), dict[str, Worker]()
    with contextlib.ExitStack() as stack:
        for name in names:
            executor = DeviceExecutor.started(_config(), lambda text: None)
            stack.callback(executor.close)
            context = ConnectorContext(
                engine_id=name, epoch=1, fingerprint=executor.model.fingerprint, layout=executor.cache.layout,
                cluster_key=KEY, host="127.0.0.1", port=0, lease_ttl_s=STOPPED_S, read_deadline_s=STOPPED_S,
                connect_deadline_s=STOPPED_S, silence_s=STOPPED_S, confirm_deadline_s=STOPPED_S,
                options=(("network", network),),
            )  # fmt: skip
            connector = create_connector("loopback", context)
            stack.callback(connector.close)
            connector.register_kv_cache(executor.cache)
            found[name] = executor, connector
        yield found


def _config() -> NodeConfig:
    handoff = HandoffConfig(connector="loopback", min_remote_tokens=1, lease_ttl_s=STOPPED_S, load_deadline_s=STOPPED_S)
    return replace(
        CONFIG,
        cache=CacheConfig(num_blocks=320, block_size=16, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512),
        handoff=handoff,
    )


@contextlib.asynccontextmanager
async def running(found: Mapping[str, Worker], drafting: Collection[str]) -> AsyncIterator[dict[str, LookupNode]]:
    """Nodes on these workers. `drafting`: which of them do. Nothing is left of any request at the end."""
    async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:
        stack.enter_context(patient())
        be_patient(stack.enter_context(pytest.MonkeyPatch.context()))  # rows with slow masks have no drafts
        peers = await stack.enter_async_context(aiohttp.ClientSession())
        nodes, turning = {}, []
        for name, (executor, connector) in found.items():
            engine = InLoopEngine(executor.config, executor, connector, lookup_drafter() if name in drafting else None)
            assert engine.ready is not None
            engine.ready = msgspec.structs.replace(
                engine.ready, engine_id=name, control_port=connector.control_port,
                max_model_len=executor.model.max_model_len,
            )  # fmt: skip
            base = tool_state(engine, name, "demo_model")
            config = replace(
                base.config,
                server=ServerConfig(role="prefill" if name[0] == "p" else "decode", node_id=name),
                scheduler=SchedulerConfig(speculation="lookup" if name in drafting else "none"),
                handoff=executor.config.handoff,
            )
            state = dataclasses.replace(base, config=config, key=KEY, peers=peers)
            for one in (base, state):
                stack.callback(one.grammar_checks.close)
            nodes[name] = LookupNode(engine, create_app(state))
            turning.append(group.create_task(engine.run()))
        try:
            yield nodes
            for node in nodes.values():
                await node.engine.rest()
        finally:
            for task in turning:
                task.cancel()


def longest_run(messages: Sequence[AnyFrame]) -> int:
    """The most tokens of a choice that one frame tells."""
    return max(len(one.token_ids) for frame in messages if isinstance(frame, Frame) for one in frame.choices)


def text_of(data: bytes, index: int = 0) -> str:
    """What a stream of chat or completions says."""
    choice = Said.by(data).choices[index]
    return str(choice["content"] or choice["text"])
