"""Fixtures for all tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import Launcher

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """Starts `pd-cluster` processes; they are stopped after the test, which fails when one leaves a process behind."""
    with Launcher() as launcher:
        yield launcher
