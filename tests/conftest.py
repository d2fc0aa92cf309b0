"""Fixtures for all tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.cluster import Launcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.system import System

# By default an example may take 0.2 s of wall time: one of 0.02 s took 0.6 s on a busy machine
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """Starts `pd-cluster` processes; they are stopped after the test, which fails when one leaves a process behind."""
    with Launcher() as launcher:
        yield launcher


@pytest.fixture(scope="session")
def shared_system() -> Iterator[System]:
    """A prefill node, a decode node and a router, for tests that leave no trace and count by differences only."""
    from tests.integration.system import running_system

    with running_system("--kv-cache-gb=0.1") as system:
        yield system
