"""One cluster for the tests of this folder: each node that starts takes 6 s of CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import Launcher
from tests.integration.gated_cluster import GatedCluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="package")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedCluster]:
    with Launcher() as launcher:
        cluster = GatedCluster(launcher, tmp_path_factory.mktemp("gates"), "p0", "p1", "d0", "strict")
        yield cluster
        cluster.stop()
