"""Masks of grammars that are waited for: no row sits out and none is slow by chance, however loaded the machine is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.worker import mask_threads
from pd_cluster.worker.logits_stages import draft_masks, grammar_masks

if TYPE_CHECKING:
    import pytest

LONG_S = 60.0


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """One page fault made a row slow that takes 0.1 ms. Steps wait for no slow row, and drafts after it are left."""
    patch.setattr(grammar_masks, "MASK_WAIT_S", LONG_S)
    patch.setattr(draft_masks, "FORCED_S", LONG_S)
    for of in (mask_threads, draft_masks):
        patch.setattr(of, "SLOW_S", LONG_S)
        patch.setattr(of, "SLOW_GROUP_S", LONG_S)
