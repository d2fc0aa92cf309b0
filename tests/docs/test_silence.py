"""The numbers of "What counts as down" are those of the product, and what a reader is given is what it keeps to."""

from __future__ import annotations

import dataclasses

import pytest

from pd_cluster.engine.liveness import RANKED_STALL_S, STALL_S
from pd_cluster.engine.step_timing import FROZEN_S, RANK_FACTOR, RANK_S, STEP_FACTOR
from pd_cluster.protocol import messages
from pd_cluster.server.requests.keepalive import BEAT_S
from pd_cluster.server.requests.prefill_client import PEER_SILENCE_S
from pd_cluster.worker import rank_frames
from pd_cluster.worker.rank_link import SILENCE_S
from pd_connectors import p2p
from pd_connectors.base import ConnectorContext
from pd_connectors.pull_limits import DOUBT_S
from pd_router.config import RouterConfig
from tests.cluster import ROOT

ROUTER = RouterConfig(start_empty=True)
GIVEN = {field.name: field.default for field in dataclasses.fields(ConnectorContext)}
RULES = [
    f"the engine: no word for max({FROZEN_S:g} s, {STEP_FACTOR:g} x the predicted step) |",
    f"| no answer to a renewal for {GIVEN['silence_s']:g} s |",
    f"| no answer to the first renewal of a load for {DOUBT_S:g} s |",
    f"| no sign of life (one a second) for {PEER_SILENCE_S:g} s |",
    f"| `/health` unanswered for `--health-timeout-s` ({ROUTER.health_timeout_s:g} s) |",
    f"| the router, each `--health-interval-s` ({ROUTER.health_interval_s:g} s) |",
    f"| the engine for {STALL_S:g} s more; for {RANKED_STALL_S:g} s with `--tp` above 1,",
    f"ended, no heartbeat (two a second) for {SILENCE_S:g} s,",
    f"within max({RANK_S:g} s, {RANK_FACTOR:g} x the predicted step) |",
]


@pytest.mark.parametrize("rule", RULES)
def test_the_page_says_how_long_each_may_be_silent(rule: str) -> None:
    assert rule in (ROOT / "docs" / "internals.md").read_text()


def test_signs_of_life_come_several_times_before_their_absence_counts() -> None:
    assert (BEAT_S, messages.HEARTBEAT_S, rank_frames.HEARTBEAT_S, GIVEN["renew_every_s"]) == (1.0, 1.0, 0.5, 1.0)
    assert GIVEN["silence_s"] == p2p.SILENCE_S, "a step loop is judged by its control thread as by others"
