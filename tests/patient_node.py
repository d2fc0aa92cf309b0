"""Patience of nodes in tests that are not about silence: a busy machine may keep a healthy process waiting for seconds.

    launcher.node("prefill")                         # PATIENT
    launcher.node("prefill", environment=IMPATIENT)  # judges silence as the product does
    launcher.node("mixed", environment=PATIENT_WITH_STEPS)  # so, too, but a step of several ranks may take longer

The hooks of tests/fork_server.py. The product gives a silent engine 2.25 s, a silent peer 2.5 s, a silent rank 3 s, a
step of several ranks 5 s, and P's HTTP 3 s to take a connection and between two bytes of its answer to D. It has no
flags for that. Here the engine announces PATIENCE_S with its first step, and all get as long.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Mapping

PATIENT = {"PD_TEST_ENGINE_HOOK": f"{__name__}:be_patient", "PD_TEST_NODE_HOOK": f"{__name__}:wait_for_peers"}
IMPATIENT: Mapping[str, str] = {}
PATIENT_WITH_STEPS = {"PD_TEST_ENGINE_HOOK": f"{__name__}:wait_for_steps"}
PATIENCE_S = 2 * HANG_S


def be_patient() -> None:
    """In an engine, before it starts."""
    from pd_cluster.engine.pipeline import Pipeline
    from pd_cluster.worker import rank_link, ranks
    from pd_connectors import base

    allow = Pipeline._allow

    def allow_more(pipeline: Pipeline, _allowed_s: float) -> None:
        allow(pipeline, PATIENCE_S)

    mock.patch.object(Pipeline, "_allow", allow_more).start()
    patient = partial(
        base.ConnectorContext, silence_s=PATIENCE_S, connect_deadline_s=PATIENCE_S, confirm_deadline_s=PATIENCE_S
    )
    mock.patch.object(base, "ConnectorContext", patient).start()
    mock.patch.object(ranks, "RankLink", partial(rank_link.RankLink, silence_s=PATIENCE_S)).start()
    wait_for_steps()


def wait_for_peers() -> None:
    """In a node's API process, before it starts."""
    from pd_cluster.server import app
    from pd_cluster.server.requests import prefill_client

    mock.patch.object(prefill_client, "PEER_SILENCE_S", PATIENCE_S).start()
    mock.patch.object(app, "CONNECT_DEADLINE_S", PATIENCE_S).start()


def wait_for_steps() -> None:
    """In an engine, before it starts."""
    from pd_cluster.engine import step_timing

    mock.patch.object(step_timing, "RANK_S", PATIENCE_S).start()
