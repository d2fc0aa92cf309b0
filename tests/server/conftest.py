"""Async tests run on asyncio, through anyio's plugin."""

from __future__ import annotations

import pytest

from pd_cluster.server import prompt_events


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def small_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill node tells a step's log-probabilities of a prompt in several events."""
    monkeypatch.setattr(prompt_events, "EVENT_ENTRIES", 3)
