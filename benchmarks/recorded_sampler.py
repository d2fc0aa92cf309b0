"""Makes an engine write recorded texts, whatever its weights are: random weights repeat nothing that could be drafted.

The sampler of an engine that starts meanwhile raises the logit of the recorded token of each row, by the seed of the
row's request and the position that it draws, and then draws as it always does. Rows after drafts are rows as any
other. So lookup, chances, worth, verification and what is given back are the product's own, which knows nothing of it.

The recorded token of a place is raised whatever is before it. So a wrong draft that is accepted is seen by its own
token alone: that what follows is drawn after the right tokens is a matter of the product's tests.

It takes three small kernels a step, with drafts and without, in captured steps and in others.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING
from unittest import mock

import torch

from pd_cluster.scheduling.sequence import sequence_seed
from pd_cluster.worker import model_runner
from pd_cluster.worker.sampler import WholeSampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.recorded_texts import RecordedAnswer
    from pd_cluster.worker.sampler import Sampled, TokenSampler
    from pd_cluster.worker.sampling_state import SamplingInputs
    from pd_kernels.backends import Kernels
    from pd_kernels.values import Draws

RAISED = 30_000.0  # of the recorded token: above all that random weights give, at any temperature up to 2
TEMPERATURE = 1.0  # of the requests: where all rows are greedy a draw is told neither seeds nor positions


class RecordedTokens:
    """The tokens of answers, by the seed of the request and the position. On the device, at the same place always.

    `seeds`: of the requests, by the number of their answer.
    """

    def __init__(self, num_answers: int, max_len: int, vocab_size: int, device: str) -> None:
        self.seeds = _seeds(num_answers)
        # Any tokens, until answers are set: the start measures steps, and equal tokens would choose equal experts
        self._table = torch.randint(vocab_size, (num_answers, max_len), device=device)

    def set(self, answers: Sequence[RecordedAnswer]) -> None:
        """From now on the request with `seeds[i]` writes `answers[i]`."""
        host = torch.zeros(self._table.shape, dtype=torch.int64)
        for at, one in enumerate(answers):
            start = len(one.prompt)
            host[at, start : start + len(one.answer)] = torch.tensor(one.answer)
        self._table.copy_(host)

    def raise_in(self, logits: torch.Tensor, draws: Draws) -> None:
        """Raise the recorded token of each row of `logits` [R, V], in place. Capturable."""
        num_answers, max_len = self._table.shape
        tokens = self._table[draws.seeds.remainder(num_answers), draws.positions.clamp(0, max_len - 1)]
        logits.scatter_(1, tokens[: len(logits), None], RAISED)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Engines that start meanwhile write these texts, as long as they live."""

        def make(num_columns: int, kernels: Kernels) -> TokenSampler:
            return RecordedSampler(WholeSampler(num_columns, kernels), self)

        with mock.patch.object(model_runner, "WholeSampler", make):
            yield


def _seeds(num: int) -> list[int]:
    """Requests' seeds, with sequences' seeds that are 0, 1 ... modulo their number."""
    found = dict[int, int]()
    seeds = count()
    while len(found) < num:
        seed = next(seeds)
        found.setdefault(sequence_seed(seed, 0) % num, seed)
    return [found[at] for at in range(num)]


@dataclass(frozen=True, slots=True)
class RecordedSampler:
    """A TokenSampler that draws as `product` does, from logits in which the recorded tokens are raised."""

    product: TokenSampler
    recorded: RecordedTokens

    @property
    def num_columns(self) -> int:
        return self.product.num_columns

    @property
    def leads(self) -> bool:
        return self.product.leads

    def draw(self, logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        if draws is not None:
            self.recorded.raise_in(logits, draws)
        return self.product.draw(logits, draws)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
        if inputs.draws is not None:
            self.recorded.raise_in(logits, inputs.draws)
        return self.product.sample(logits, inputs)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return self.product.whole(logits)

    def tell_late(self, absent: frozenset[int]) -> None:
        self.product.tell_late(absent)
