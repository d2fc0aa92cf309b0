"""What states of the executor share, and what is left of one after a transition that succeeded, or failed."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import TYPE_CHECKING, NoReturn

from pd_cluster.errors import PdError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.models.model import Model


@dataclass(slots=True)
class Weights:
    """A loaded model, and what its chosen products use."""

    model: Model = field(init=False)
    owned: ExitStack = field(default_factory=ExitStack)
    has_products: bool = False  # they are chosen by measurement once, beside the first cache


class StateLeft(PdError):
    """A state was used after the executor had left it."""


class LeftState:
    """In place of the class of a state that was left. It keeps no memory alive, and has nothing to release."""

    def close(self) -> None:
        """The present state owns what this one did."""

    def __getattr__(self, name: str) -> NoReturn:
        raise StateLeft(f"{name}: the executor has left this state")


@contextmanager
def without_locals() -> Iterator[None]:
    """Let a failure hold no memory by the variables in its traceback: the handler may free the cache and make another.

    Those of the function that uses this context stay.
    """
    try:
        yield
    except BaseException as error:
        one: BaseException | None = error
        while one is not None:
            clear_frames(one.__traceback__)
            one = one.__cause__ or one.__context__
        raise
