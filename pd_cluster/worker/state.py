"""What the states of an executor share, and what is left of one after a transition that succeeded, or failed."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from pd_cluster.errors import PdError
from pd_cluster.worker.host_memory import UNPIN_S
from pd_cluster.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from pd_cluster.models.model import Model
    from pd_cluster.worker.adapter_store import AdapterStore
    from pd_cluster.worker.device_plan import DevicePlan
    from pd_cluster.worker.kv_cache import KVCache

NextState = TypeVar("NextState", bound="DeviceState")


@dataclass(slots=True)
class Weights:
    """A loaded model, and what its chosen products use."""

    model: Model = field(init=False)
    owned: ExitStack = field(default_factory=ExitStack)
    adapters: AdapterStore | None = None  # None: --lora-slots 0
    has_products: bool = False  # they are chosen by measurement once, beside the first cache


class StateLeft(PdError):
    """A state was used after the executor had left it."""


class LeftState:
    """In place of the class of a state that was left. It keeps no memory alive, and has nothing to release."""

    def close(self) -> None:
        """The present state owns what this one did."""

    def __getattr__(self, name: str) -> NoReturn:
        raise StateLeft(f"{name}: the executor has left this state")


class DeviceState:
    """A state of the executor on one device.

    A transition leaves it only when the next state is complete, and owns the same and more.
    """

    _cache: KVCache | None

    def __init__(self, plan: DevicePlan, weights: Weights, cache: KVCache | None = None) -> None:
        """`weights`: empty before they are loaded. `cache`: None before it is allocated."""
        self._plan, self._weights, self._cache = plan, weights, cache
        self.layout, self.config = plan.layout, plan.config
        self._ranks = None if plan.place is None else plan.place.ranks

    def close(self) -> None:
        """Wait for the devices and release what the executor has acquired. Idempotent.

        The cache's memory lives until the last reference to it, a transport's for instance, is gone.
        """
        self.release() if self._ranks is None else self._ranks.close(self.release)

    def release(self, waits: bool = True) -> None:
        """The part of `close` for this device. `waits`: for it."""
        with self._plan.owned, self._weights.owned:
            if waits:
                self._synchronize()
            until_s = time.monotonic() + UNPIN_S
            if self._cache is not None:
                self._cache.host.close(UNPIN_S if waits else 0.0)
            if waits and self._weights.adapters is not None:
                self._weights.adapters.close(until_s - time.monotonic())

    def left_for(self, state: NextState) -> NextState:
        """Leave this state. -> `state`, which owns from now on what this one did."""
        vars(self).clear()
        self.__class__ = LeftState  # type: ignore[assignment]
        return state

    def use_device(self) -> None:
        """Make the device the calling thread's own: else a call of CUDA takes memory of the first one."""
        if self._plan.device.type == "cuda":
            torch.cuda.set_device(self._plan.device)

    def _on_all(self, phase: str, *arguments: Any) -> AbstractContextManager[list[Any]]:
        """The block's work is this device's part of a phase. -> the results of other ranks, after the block.

        Only rank 0 takes others along.
        """
        return nullcontext([]) if self._ranks is None else self._ranks.phase(phase, *arguments)

    def _back_to(self, phase: str, state: NextState, released: ExitStack | None = None) -> NextState:
        """Leave this state for one that owns less, and give the memory to the device."""
        with self._on_all(phase):
            self._synchronize()
            if self._cache is not None:
                self._cache.host.close()
            if released is not None:
                released.close()
        self.left_for(state)
        torch.cuda.empty_cache()  # nothing on a CPU
        return state

    def _make_runner(self, cache: KVCache, max_len: int) -> ModelRunner:
        return ModelRunner(self._plan, self._weights.model, cache, max_len, self._weights.adapters)

    def _synchronize(self) -> None:
        if self._plan.device.type == "cuda":
            torch.cuda.synchronize(self._plan.device)


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
