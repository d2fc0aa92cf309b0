"""What tests of workers compare logits by."""

from __future__ import annotations

from math import inf, nan
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.worker.scheduled import Drawn, ScheduledWorker, errors_by_request

NUM_TOKENS = 5


class SumsBefore(torch.nn.Module):
    """The logits after a token are how often each token was there up to it."""

    def forward(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=torch.nn.functional.one_hot(ids, NUM_TOKENS).cumsum(1).float())


def drawn(name: str, number: int, tokens: list[int], **changes: float) -> list[Drawn]:
    """All draws of a sequence: as the model has them, but for one number after each token."""
    seq = SimpleNamespace(seq_id=number, token_ids=tokens, request=SimpleNamespace(request_id=name))
    rows = SumsBefore()(torch.tensor([tokens])).logits[0]
    found = [Drawn(cast("Any", seq), end, rows[end - 1].clone()) for end in range(1, len(tokens) + 1)]
    for one in found:
        one.logits[0] += changes.get(f"at_{one.end}", 0.0)
    return found


def worker_of(*draws: list[Drawn]) -> ScheduledWorker:
    return cast("ScheduledWorker", SimpleNamespace(drawn=[one for some in draws for one in some]))


def test_each_sequence_is_compared_with_its_own_tokens_whatever_the_others_lengths_are() -> None:
    worker = worker_of(drawn("a", 1, [1, 2, 3]), drawn("b", 2, [4]), drawn("a", 3, [0, 0, 4, 4, 2]))
    assert errors_by_request(worker, SumsBefore()) == {"a": 0.0, "b": 0.0}
    assert errors_by_request(worker, SumsBefore(), ["b"]) == {"b": 0.0}


@pytest.mark.parametrize(("change", "least"), [(0.5, 0.1), (nan, inf)])
def test_one_number_that_is_another_is_found(change: float, least: float) -> None:
    worker = worker_of(drawn("a", 1, [1, 2, 3], at_2=change), drawn("b", 2, [4, 4]))
    errors = errors_by_request(worker, SumsBefore())
    assert errors["a"] >= least
    assert errors["b"] == 0.0
