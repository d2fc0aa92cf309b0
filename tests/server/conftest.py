"""Async tests run on asyncio, through anyio's plugin."""

from __future__ import annotations

import pytest


def pytest_pycollect_makemodule() -> None:
    """Before a test file is imported. Imports of this file would hold up the process that starts workers."""
    from tests.server import shared_routes

    shared_routes.share()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def patient_grammar_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks run at niceness 10 and this half of the suite at 10 too: beside the other half one took 10 s."""
    from pd_cluster.server.grammar import grammar_checks

    monkeypatch.setattr(grammar_checks, "REQUEST_DEADLINE_S", 90.0)
    monkeypatch.setattr(grammar_checks, "CHECK_DEADLINE_S", 90.0)
