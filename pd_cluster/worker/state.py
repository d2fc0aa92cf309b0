"""What all states of an executor have in common: one is present, and owns all that the executor has acquired."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, TypeVar

from pd_cluster.errors import PdError

NextState = TypeVar("NextState")


class StateLeft(PdError):
    """A state was used after the executor had left it."""


class ExecutorState:
    """A state of an executor. A transition leaves it only when the next state is complete, and owns the same and more.

    A state that was left has no attributes. So it keeps no memory alive, and releases nothing a second time.
    """

    @property
    def is_left(self) -> bool:
        return not vars(self)

    def left_for(self, state: NextState) -> NextState:
        """Leave this state. -> `state`, which owns from now on what this one did."""
        vars(self).clear()
        return state

    if not TYPE_CHECKING:  # mypy would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            if self.is_left:
                raise StateLeft(f"{type(self).__name__}.{name}: the executor has left this state")
            raise AttributeError(name)
