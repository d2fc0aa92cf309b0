"""Whether an engine process makes progress. Pure: its input is the engine's messages and the time.

    state     means                                                   becomes
    alive     it sent a message within the allowed silence            frozen after the allowed silence
    frozen    no step has ended within max(2.25 s, 4 x the prediction) alive by a message, dead after stall_s more
    dead      its requests fail and the node ends                   -

Of several ranks, each of which holds a GPU, a frozen engine is dead RANKED_STALL_S later, unless the thread that
watches the ranks still gives signs of life: that thread ends the engine by itself when a rank or a step misses a
deadline.

All other messages come from the engine's step loop, between two steps, at least one per heartbeat. So silence means a
step that does not end, or a process that does not run. Before a step that may take longer than `FROZEN_S` the engine
allows itself more silence (`messages.SilenceAllowed`); that stands until it allows another.
"""

from __future__ import annotations

from enum import StrEnum, auto
from math import inf

from pd_cluster.engine.step_timing import FROZEN_S

STALL_S = 60.0  # a frozen engine that sends nothing for so long is dead
RANKED_STALL_S = 0.5  # of several ranks, without a sign of life: a process that does not run leaves their GPUs waiting


class EngineState(StrEnum):
    """See the module's table."""

    ALIVE = auto()
    FROZEN = auto()
    DEAD = auto()


class EngineLiveness:
    """The state of one engine process, from its ready message on. `now`: seconds of a PatientClock."""

    def __init__(
        self, now: float, *, frozen_s: float = FROZEN_S, stall_s: float = STALL_S, mute_s: float = inf
    ) -> None:
        """`mute_s`: in place of `stall_s` when there were no signs of life for `frozen_s`."""
        self._frozen_s = frozen_s
        self._mute_s = mute_s
        self._signed_at = now
        self._stall_s = stall_s
        self._allowed_s = frozen_s
        self._received_s = now

    def received(self, now: float) -> None:
        """Note that the engine has sent a message."""
        self._received_s = now

    def runs(self, now: float) -> None:
        """Note a sign of life."""
        self._signed_at = now

    def allow(self, allowed_s: float) -> None:
        """Set how long the engine may be silent from now on, as it has announced."""
        self._allowed_s = max(self._frozen_s, allowed_s)

    def state(self, now: float) -> EngineState:
        silent_s = now - self._received_s
        if silent_s < self._allowed_s:
            return EngineState.ALIVE
        is_mute = now - self._signed_at >= self._frozen_s
        stall_s = min(self._mute_s, self._stall_s) if is_mute else self._stall_s
        return EngineState.FROZEN if silent_s < self._allowed_s + stall_s else EngineState.DEAD

    def reason(self, now: float) -> str:
        """A sentence for logs and errors: for how long the engine has been silent, and how long is allowed."""
        return f"the engine has said nothing for {now - self._received_s:.1f} s; {self._allowed_s:g} s are allowed"
