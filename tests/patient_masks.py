"""Masks of grammars that are waited for: no row sits out and none is slow by chance, however loaded the machine is."""

from __future__ import annotations

from threading import Barrier
from typing import TYPE_CHECKING

from pd_cluster.worker import mask_threads
from pd_cluster.worker.logits_stages import draft_masks, grammar_masks
from pd_connectors import p2p

if TYPE_CHECKING:
    import pytest

    from pd_cluster.drafting.forced import ForcedTokens
    from pd_cluster.worker.grammars import Grammars
    from pd_cluster.worker.mask_threads import MaskThreads

LONG_S = 60.0


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """One page fault made a row slow that takes 0.1 ms. Steps wait for no slow row, and drafts after it are left."""
    patch.setattr(grammar_masks, "MASK_WAIT_S", LONG_S)
    patch.setattr(draft_masks, "FORCED_S", LONG_S)
    for of in (mask_threads, draft_masks):
        patch.setattr(of, "SLOW_S", LONG_S)
        patch.setattr(of, "SLOW_GROUP_S", LONG_S)
    # Steps then wait for each mask: eight of a thread 0.3 s late take 2.4 s, and a load failed as its peer was frozen
    patch.setattr(p2p.StepLoopWatch, "is_frozen", False)


def wait_for_masks(threads: MaskThreads) -> None:
    """Wait until nothing is computed on any thread, and no search for forced tokens waits."""
    for pool in threads._pools.values():
        barrier = Barrier(pool._max_workers + 1)
        for _ in range(pool._max_workers):
            pool.submit(barrier.wait, LONG_S)
        barrier.wait(LONG_S)
    for _ in range(2):  # the end of masks after drafts begins searches
        threads._following.submit(int).result(LONG_S)


def await_forced(grammars: Grammars, patch: pytest.MonkeyPatch) -> None:
    """Have each plan of a step wait for what is forced: answers ended before a thread 0.3 s late."""
    take = grammars.take_forced

    def take_all() -> list[ForcedTokens]:
        wait_for_masks(grammars.mask_threads)
        return take()

    patch.setattr(grammars, "take_forced", take_all)
