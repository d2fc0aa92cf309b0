"""Whether an engine process makes progress. Pure: its input is the engine's messages and the time.

    state     means                                                   becomes
    alive     it sent a message within the allowed silence            frozen after the allowed silence
    frozen    no step has ended within max(3 s, 4 x the prediction)   alive by a message, dead after stall_s more
    dead      its requests fail and the node ends                   -

All messages come from the engine's step loop, between two steps, at least one per heartbeat. So silence means a step
that does not end, or a process that does not run. Before a step that may take longer than `FROZEN_S`
the engine allows itself more silence (`messages.SilenceAllowed`); that stands until it allows another.
"""

from __future__ import annotations

from enum import StrEnum, auto

from pd_cluster.engine.step_timing import FROZEN_S

STALL_S = 60.0  # a frozen engine that sends nothing for so long is dead
RANKED_STALL_S = 0.5  # of several ranks: each holds a GPU that waits in a collective for the one that stands still


class EngineState(StrEnum):
    """See the module's table."""

    ALIVE = auto()
    FROZEN = auto()
    DEAD = auto()


class EngineLiveness:
    """The state of one engine process, from its ready message on. `now`: seconds of a PatientClock."""

    def __init__(self, now: float, *, frozen_s: float = FROZEN_S, stall_s: float = STALL_S) -> None:
        self._frozen_s = frozen_s
        self._stall_s = stall_s
        self._allowed_s = frozen_s
        self._heard_at = now

    def heard(self, now: float) -> None:
        """Note that the engine has sent a message."""
        self._heard_at = now

    def allow(self, allowed_s: float) -> None:
        """Set how long the engine may be silent from now on, as it has announced."""
        self._allowed_s = max(self._frozen_s, allowed_s)

    def state(self, now: float) -> EngineState:
        silent_s = now - self._heard_at
        if silent_s < self._allowed_s:
            return EngineState.ALIVE
        return EngineState.FROZEN if silent_s < self._allowed_s + self._stall_s else EngineState.DEAD

    def reason(self, now: float) -> str:
        """A sentence for logs and errors: for how long the engine has been silent, and how long is allowed."""
        return f"the engine has said nothing for {now - self._heard_at:.1f} s; {self._allowed_s:g} s are allowed"
