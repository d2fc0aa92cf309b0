"""Whether an engine process makes progress. Pure: fed what it says and the time.

    state     means                                                   becomes
    alive     it has said something within the allowed silence        frozen after the allowed silence
    frozen    no step has ended within max(3 s, 4 x the prediction)   alive by a message, dead after stall_s more
    dead      it is given up                                          -

All that an engine says comes from its step loop, between two steps, and it says something once a heartbeat. So
silence is a step that does not end, or a process that does not run. Before a step that may take longer than `FROZEN_S`
the engine allows itself more silence (`messages.SilenceAllowed`); that stands until it allows another.
"""

from __future__ import annotations

from enum import StrEnum, auto

from pd_cluster.engine.forecast import FROZEN_S

STALL_S = 60.0  # what a frozen engine gets to go on


class EngineState(StrEnum):
    """See the module's table."""

    ALIVE = auto()
    FROZEN = auto()
    DEAD = auto()


class EngineLiveness:
    """Of one engine process, from its ready message on. `now`: seconds of a clock that its reader keeps patiently."""

    def __init__(self, now: float, *, frozen_s: float = FROZEN_S, stall_s: float = STALL_S) -> None:
        self._frozen_s = frozen_s
        self._stall_s = stall_s
        self._allowed_s = frozen_s
        self._heard_at = now

    def heard(self, now: float) -> None:
        """A message has come."""
        self._heard_at = now

    def allow(self, allowed_s: float) -> None:
        """The engine says for how long it may be silent from now on."""
        self._allowed_s = max(self._frozen_s, allowed_s)

    def state(self, now: float) -> EngineState:
        silent_s = now - self._heard_at
        if silent_s < self._allowed_s:
            return EngineState.ALIVE
        return EngineState.FROZEN if silent_s < self._allowed_s + self._stall_s else EngineState.DEAD

    def reason(self, now: float) -> str:
        """For people: since when the engine is silent, and for how long it may be."""
        return f"the engine has said nothing for {now - self._heard_at:.1f} s; {self._allowed_s:g} s are allowed"
