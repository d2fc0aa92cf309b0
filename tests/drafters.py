"""Drafters of tests: they know the answers in advance, and say them right, wrong, or right at first."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from unittest import mock
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KINDS = ("right", "wrong", "mixed")


def bent(drafts: Sequence[int], kind: str, at: int) -> tuple[int, ...]:
    """`drafts` as a drafter of that kind says them. `at`: their place in the answer; it decides what is wrong."""
    if kind == "right":
        return tuple(drafts)
    num_right = 0 if kind == "wrong" else crc32(at.to_bytes(4)) % (len(drafts) + 1)
    return tuple(token if index < num_right else token ^ 1 for index, token in enumerate(drafts))


@dataclass
class ScriptedDrafter:
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


class LookUpDrafter:
    """Proposes what followed the last token before, as a drafter without a model does."""

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        *known, last = token_ids
        at = len(known) - known[::-1].index(last) if last in known else len(token_ids)
        return tuple(token_ids[at : at + most])


def look_up() -> None:
    """In an engine of tests, before it starts (see tests/patient_node.py): it has a drafter."""
    from pd_cluster.engine import core
    from tests.patient_node import be_patient

    be_patient()
    mock.patch.object(core, "EngineCore", partial(core.EngineCore, drafter=LookUpDrafter())).start()
