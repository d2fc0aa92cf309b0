"""The side stream of a simulated worker: copies beside a step's forward, at the worst moment that is allowed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.batch import BlockCopies
    from pd_connectors.protocol.layout import KVGroup

GARBAGE = -1
Cell = tuple[int, int, int]  # (group, block, slot)


@dataclass
class SideStream:
    """Runs each save and load of a step before or after the step's forward, in any order; until then its target holds
    garbage. What the next step does comes after all of them (`finish`).
    """

    groups: tuple[KVGroup, ...]
    device: dict[Cell, int]
    host: dict[Cell, int]
    write: Callable[[Cell, int], None]  # into `device`
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    num_saved: int = 0
    num_loaded: int = 0
    _late: list[Callable[[], None]] = field(default_factory=list)
    _step: int = -1

    def begin(self, step: int, copies: BlockCopies) -> None:
        """After the copies of the main stream, before the forward."""
        assert not self._late, "the step before is not over"
        self._step = step
        host = [(group, block) for group, _, block in copies.save] + [copy[:2] for copy in copies.load]
        assert len({copy[::2] for copy in copies.save}) == len(copies.save), "two saves into one block"
        assert not {copy[::2] for copy in copies.save} & {copy[:2] for copy in copies.load}, "a save into a source"
        swapped = {copy[::2] for copy in copies.swap_out} | {copy[:2] for copy in copies.swap_in}
        assert not swapped & {copy[:2] for copy in copies.load}, "a swapped block is loaded in the same step"
        assert not {copy[::2] for copy in copies.swap_out} & set(host), "a swap into a block of a side copy"
        devices = [copy[::2] for copy in copies.load]
        assert len(set(devices)) == len(devices), "two loads into one block"
        assert not {copy[:2] for copy in copies.save} & set(devices), "a block is saved and loaded in one step"
        self.num_saved += len(copies.save)
        self.num_loaded += len(copies.load)
        runs: list[Callable[[], None]] = [partial(self._save, *copy) for copy in copies.save]
        runs += [partial(self._load, *copy) for copy in copies.load]
        for group, _, block in copies.save:
            self.host.update(((group, block, slot), GARBAGE) for slot in range(self.groups[group].block_size))
        for group, _, block in copies.load:
            self._fill(group, block, {})
        self.rng.shuffle(runs)
        for run in runs:
            if self.rng.random() < 0.3:
                run()
            else:
                self._late.append(run)

    def finish(self, step: int) -> None:
        """The copies of all steps up to this one are over."""
        if self._step <= step:
            for run in self._late:
                run()
            self._late.clear()

    def _save(self, group: int, source: int, to: int) -> None:
        for slot in range(self.groups[group].block_size):
            self.host[group, to, slot] = self.device.get((group, source, slot), GARBAGE)

    def _load(self, group: int, source: int, to: int) -> None:
        self._fill(group, to, {slot: self.host.get((group, source, slot), GARBAGE) for slot in range(10**3)})

    def _fill(self, group: int, block: int, content: dict[int, int]) -> None:
        for slot in range(self.groups[group].block_size):
            self.write((group, block, slot), content.get(slot, GARBAGE))
