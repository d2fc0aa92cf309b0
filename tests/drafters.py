"""Drafters of tests: they know the answers in advance, and say them right, wrong, or right at first."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock
from zlib import crc32

import numpy as np

from pd_cluster.drafting.indexes import Indexes
from pd_cluster.drafting.lookup_drafter import LookupDrafter
from pd_cluster.drafting.offer import DraftOffer
from pd_cluster.scheduling.drafts import Speculation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pd_cluster.engine.core import EngineCore

KINDS = ("right", "wrong", "mixed")


def bent(drafts: Sequence[int], kind: str, at: int) -> tuple[int, ...]:
    """`drafts` as a drafter of that kind says them. `at`: their place in the answer; it decides what is wrong."""
    if kind == "right":
        return tuple(drafts)
    num_right = 0 if kind == "wrong" else crc32(at.to_bytes(4)) % (len(drafts) + 1)
    return tuple(token if index < num_right else token ^ 1 for index, token in enumerate(drafts))


class TokenDrafter:
    """Implements Drafter by the tokens of a sequence alone, and is sure of what it proposes."""

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow `token_ids`."""
        raise NotImplementedError

    def offer(self, seq_id: int, token_ids: list[int], num_ahead: int, most: int) -> DraftOffer | None:
        drafts = self.propose(token_ids, num_ahead + most)[num_ahead:]
        return DraftOffer(drafts, np.ones(len(drafts), np.float32)) if drafts else None

    def expect(self, known: Mapping[int, list[int]], prediction: Sequence[int], num_prompt: int) -> None: ...

    def note(self, seq_id: int, num_drafts: int, num_right: int) -> None: ...

    def prepare(self, is_late: Callable[[], bool]) -> None: ...

    def forget(self, seq_id: int) -> None: ...

    def check(self) -> None: ...


@dataclass
class ScriptedDrafter(TokenDrafter):
    """Finds answers that begin with the tokens of a sequence, and proposes what follows in the first of them."""

    answers: tuple[tuple[int, ...], ...]  # with their prompts
    kind: str = "right"
    num_proposed: int = field(default=0)

    @classmethod
    def of(cls, answers: Iterable[Sequence[int]], kind: str) -> ScriptedDrafter:
        return cls(tuple(map(tuple, answers)), kind)

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        known = tuple(token_ids)
        found = next((one for one in self.answers if one[: len(known)] == known), ())
        drafts = bent(found[len(known) : len(known) + most], self.kind, len(known))
        self.num_proposed += len(drafts)
        return drafts


class LookUpDrafter(TokenDrafter):
    """Proposes what followed the last token before, as a drafter without a model does."""

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        *known, last = token_ids
        at = len(known) - known[::-1].index(last) if last in known else len(token_ids)
        return tuple(token_ids[at : at + most])


class LaterPool(Executor):
    """Does what it is asked for when it is told."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._at_once = at_once

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        if self._at_once:
            self.run()
        return future

    def run(self) -> None:
        for future, work in self.waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        self.waiting.clear()


def lookup_drafter() -> LookupDrafter:
    """The product's, with indexes that are there at once: its drafts do not depend on the speed of a thread."""
    return LookupDrafter(Indexes(LaterPool(at_once=True)))


def at_fixed_prices(core: EngineCore) -> EngineCore:
    """The engine, with drafts weighed by an H200's prices: no step of this machine changes those."""
    if (drafting := core._scheduler._drafting) is not None:
        drafting._costs = Speculation(drafting._drafter)
    return core


def look_up() -> None:
    """In an engine of tests, before it starts (see tests/patient_node.py): it has a drafter."""
    from pd_cluster.engine import core
    from tests.patient_node import be_patient

    be_patient()
    made = partial(core.EngineCore, drafter=LookUpDrafter())
    mock.patch.object(core, "EngineCore", lambda *args, **more: at_fixed_prices(made(*args, **more))).start()


def look_up_at_fixed_prices() -> None:
    """In an engine of tests, before it starts: the drafter is the one that its flags name."""
    from pd_cluster.engine import core
    from tests.patient_node import be_patient

    be_patient()
    made = core.EngineCore
    mock.patch.object(core, "EngineCore", lambda *args, **more: at_fixed_prices(made(*args, **more))).start()
