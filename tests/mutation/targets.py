"""What is mutated, and the fast tests that must notice: the quickest to fail first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = (".", "router", "connectors", "kernels")
_SCHEDULER = (
    "tests/scheduling/test_scheduler_edges.py",
    "tests/scheduling/test_scheduler_cases.py",
    "tests/scheduling/test_scheduler_handoff.py",
    "tests/scheduling/test_known_tokens.py",
    "tests/scheduling/test_scheduler_machine.py",
    "tests/engine/test_pool_search.py",
)
_ROUTER = ("tests/router/test_router_failures.py", "tests/router/test_router_disconnect.py")


@dataclass(frozen=True, slots=True)
class Target:
    """A file of the repository, and test files."""

    file: str
    tests: tuple[str, ...]

    @property
    def source(self) -> str:
        return (ROOT / self.file).read_text()

    @property
    def module(self) -> str:
        """How it is imported."""
        parts = Path(self.file).with_suffix("").parts
        return ".".join(parts[1:] if parts[0] in SOURCE_ROOTS else parts)


TARGETS = (
    Target(
        "connectors/pd_connectors/lease.py",
        ("tests/connectors/test_lease_table.py", "tests/connectors/test_simulation.py"),
    ),
    Target(
        "connectors/pd_connectors/pull.py", ("tests/connectors/test_pull.py", "tests/connectors/test_simulation.py")
    ),
    Target(
        "connectors/pd_connectors/block_reads.py",
        ("tests/connectors/test_block_reads.py", "tests/connectors/test_pull.py"),
    ),
    Target("connectors/pd_connectors/protocol/layout.py", ("tests/connectors/test_layout.py",)),
    Target(
        "connectors/pd_connectors/reader.py", ("tests/connectors/test_reader.py", "tests/connectors/test_simulation.py")
    ),
    Target(
        "connectors/pd_connectors/owner.py", ("tests/connectors/test_owner.py", "tests/connectors/test_simulation.py")
    ),
    Target("pd_cluster/scheduling/block_manager.py", ("tests/scheduling/test_block_manager.py", *_SCHEDULER)),
    Target("pd_cluster/scheduling/prefix_cache.py", ("tests/scheduling/test_block_manager.py", *_SCHEDULER)),
    Target("pd_cluster/scheduling/kv_memory.py", (*_SCHEDULER, "tests/scheduling/test_turns.py")),
    Target("pd_cluster/scheduling/load_memory.py", (*_SCHEDULER, "tests/scheduling/test_turns.py")),
    Target("pd_cluster/scheduling/lifecycle.py", _SCHEDULER),
    Target("pd_cluster/scheduling/planner.py", (*_SCHEDULER, "tests/scheduling/test_step_limit.py")),
    Target("pd_cluster/scheduling/queues.py", (*_SCHEDULER, "tests/scheduling/test_turns.py")),
    Target("pd_cluster/scheduling/scheduler.py", _SCHEDULER),
    Target("pd_cluster/scheduling/arrivals.py", _SCHEDULER),
    Target("router/pd_router/requests/legs.py", ("tests/router/test_legs.py", *_ROUTER)),
    Target("router/pd_router/nodes/node_connection.py", ("tests/router/test_node_connection.py", *_ROUTER)),
    Target("router/pd_router/nodes/connection_pool.py", ("tests/router/test_node_connection.py", *_ROUTER)),
    Target("router/pd_router/calls/client_call.py", ("tests/router/test_client_connection.py", *_ROUTER)),
    Target("router/pd_router/requests/splice.py", ("tests/router/test_splice.py", *_ROUTER)),
)
