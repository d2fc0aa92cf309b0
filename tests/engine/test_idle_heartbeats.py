"""Heartbeats of an engine without work: its API process judges it by them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from pd_cluster.engine.core import EngineCore
from pd_cluster.protocol.messages import HEARTBEAT_S, EngineStats
from tests.engine.test_core_pipeline import CONFIG, FakeMailbox, connector, executor

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.protocol.messages import FromEngine
    from pd_cluster.worker.executor import Executor
    from pd_connectors.base import Connector

__all__ = ["connector", "executor"]
NUM_WAITS = 40


@dataclass
class IdleMailbox(FakeMailbox):
    """Waits take the time of `now_s`, and no other. Each third one ends early, by a message that changes nothing."""

    now_s: float = 100.0
    num_waits: int = 0
    sent_s: list[float] = field(default_factory=list)  # of statistics
    stop: Callable[[], None] = lambda: None

    def wait(self, timeout_s: float) -> bool:
        self.num_waits += 1
        is_woken = self.num_waits % 3 == 0
        self.now_s += 0.99 * timeout_s if is_woken else timeout_s
        if self.num_waits == NUM_WAITS:
            self.stop()
        return is_woken

    def send(self, message: FromEngine) -> None:
        if isinstance(message, EngineStats):
            self.sent_s.append(self.now_s)


def test_an_idle_engine_is_never_silent_for_longer_than_a_heartbeat(executor: Executor, connector: Connector) -> None:
    """Also if it is woken just before one is due, and has nothing to tell."""
    mailbox = IdleMailbox()
    core = EngineCore(CONFIG, executor, connector, mailbox, clock=lambda: mailbox.now_s)
    mailbox.stop = core.stop
    core.run()
    gaps_s = [later - earlier for earlier, later in pairwise(mailbox.sent_s)]
    assert len(gaps_s) > NUM_WAITS / 3
    assert max(gaps_s) == pytest.approx(HEARTBEAT_S)
