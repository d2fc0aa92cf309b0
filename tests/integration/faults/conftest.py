"""One cluster for the tests of this folder: each node that starts takes 6 s of CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import Launcher
from tests.integration.fault_cluster import FaultCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

# As between machines: over shared memory a reader needs no help of the other process, so nothing could be late.
NETWORK = {"UCX_TLS": "tcp"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="package")
def nodes() -> Iterator[FaultCluster]:
    with Launcher() as launcher:
        cluster = FaultCluster(launcher, "p0", "p1", "d0", "strict", environment=NETWORK)
        yield cluster
        cluster.stop()
