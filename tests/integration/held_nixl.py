"""The connector `nixl` of a node with a gate (`tests.integration.gate`).

An engine imports its connector, by the product's own flag, before it makes its scheduler. So the connector can exchange
the part of the scheduler that leaves sequences out of steps, with the command as it is.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from pd_cluster.engine.pipeline import Pipeline
from pd_cluster.scheduling import queues
from pd_cluster.scheduling.unready import Unready
from pd_connectors import p2p
from pd_connectors.nixl.connector import NixlConnector
from tests.integration.gate import VARIABLE, patience_of, pipe_of
from tests.patient_node import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.sequence import Sequence
    from pd_connectors.base import ConnectorContext
    from pd_connectors.pull_limits import PullLimits


class HeldUnready(Unready):
    """Leaves out sequences at the gate's limits, too. Each plan asks for its truth once, before all else."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._prompt = self._answer = inf

    def __bool__(self) -> bool:
        try:
            self._prompt, self._answer = map(float, self._path.read_text().split())
        except FileNotFoundError:
            self._prompt = self._answer = inf
        return min(self._prompt, self._answer) < inf or super().__bool__()

    def holds(self, seq: Sequence, now_s: float) -> bool:
        is_held = seq.num_scheduled_tokens >= self._prompt or seq.num_output_tokens >= self._answer
        return is_held or super().holds(seq, now_s)


class HeldLimits:
    """Limits of loads, of a patient node while there is the file at `patience`."""

    def __init__(self, limits: PullLimits, patience: Path) -> None:
        self._limits = limits
        self._patience = patience

    def __getattr__(self, name: str) -> float:
        limit: float = getattr(self._limits, name)
        return PATIENCE_S if name in ("silence_s", "confirm_s") and self._patience.exists() else limit


class HeldNixl(NixlConnector):
    """Its engine keeps to the gate that the environment names."""

    def __init__(self, context: ConnectorContext) -> None:
        self._gate = Path(os.environ[VARIABLE])
        patience, limits, allow = patience_of(self._gate), p2p._limits, Pipeline._allow

        def allow_more(pipeline: Pipeline, allowed_s: float) -> None:
            allow(pipeline, PATIENCE_S if patience.exists() else allowed_s)

        mock.patch.object(queues, "Unready", partial(HeldUnready, self._gate)).start()
        mock.patch.object(p2p, "_limits", lambda context: HeldLimits(limits(context), patience)).start()
        mock.patch.object(Pipeline, "_allow", allow_more).start()
        super().__init__(context)

    def set_waker(self, wake: Callable[[], None]) -> None:
        super().set_waker(wake)
        threading.Thread(target=self._wake_often, args=(wake,), name="gate", daemon=True).start()

    def _wake_often(self, wake: Callable[[], None]) -> None:
        pipe = os.open(pipe_of(self._gate), os.O_RDWR)  # with a writer of its own the pipe never ends
        while os.read(pipe, 1):
            wake()
