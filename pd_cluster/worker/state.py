"""What all states of an executor have in common: one is present, and owns all that the executor has acquired."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from pd_cluster.errors import PdError

NextState = TypeVar("NextState")


class StateLeft(PdError):
    """A state was used after the executor had left it."""


class ExecutorState:
    """A state of an executor.

    A transition leaves it only when the next state is complete, and owns the same and more.
    """

    def left_for(self, state: NextState) -> NextState:
        """Leave this state. -> `state`, which owns from now on what this one did."""
        vars(self).clear()
        self.__class__ = LeftState
        return state

    def close(self) -> None:
        """Wait for the devices and release what the executor has acquired. Idempotent.

        The cache's memory lives until the last reference to it, a transport's for instance, is gone.
        """


class LeftState(ExecutorState):
    """What a state becomes that was left. It keeps no memory alive, and has nothing to release."""

    def __getattr__(self, name: str) -> NoReturn:
        raise StateLeft(f"{name}: the executor has left this state")
