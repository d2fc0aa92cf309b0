"""One cluster for the attacks of this folder: each of them checks at its end that it has changed nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import Launcher
from tests.security.live_cluster import LiveCluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, through anyio's plugin."""
    return "asyncio"


@pytest.fixture(scope="package")
def cluster() -> Iterator[LiveCluster]:
    """Running `pd-cluster up`, 1P + 1D + router."""
    with Launcher() as launcher:
        live = LiveCluster(launcher)
        yield live
        live.close()
