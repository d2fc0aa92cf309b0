"""The 8 bytes by which ranks choose the best token of a row."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.worker.collectives import ids_of, keys_of

SCORES = st.one_of(
    st.floats(width=32, allow_nan=False), st.sampled_from([0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45])
)


@given(st.lists(st.tuples(SCORES, st.integers(0, (1 << 31) - 1)), min_size=1, max_size=8, unique_by=lambda one: one[1]))
def test_the_largest_key_has_the_best_score_and_of_equals_the_lowest_id(candidates: list[tuple[float, int]]) -> None:
    scores, ids = zip(*candidates, strict=True)
    keys = keys_of(torch.tensor(scores, dtype=torch.float32), torch.tensor(ids))
    assert ids_of(keys).tolist() == list(ids)
    best = max(scores)
    assert ids_of(keys.max()).item() == min(token for score, token in candidates if score == best)
