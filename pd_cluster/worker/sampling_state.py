"""Each live sequence's sampling settings, as arrays over rows, and the inputs that one step's sampler needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.engine.batch import SequenceStart
    from pd_kernels.packed import Ints


@dataclass(frozen=True, slots=True)
class Penalties:
    """See pd_kernels.sampling.apply_penalties. `rows`: which of the step's R logits rows they concern."""

    rows: torch.Tensor  # int64 [P]
    prompt_seen: torch.Tensor  # bool [P, V]
    output_counts: torch.Tensor  # int32 [P, V]
    repetition: torch.Tensor  # float32 [P]
    presence: torch.Tensor
    frequency: torch.Tensor


@dataclass(frozen=True, slots=True)
class Truncation:
    """See pd_kernels.sampling.truncate."""

    rows: torch.Tensor  # int64 [P]
    top_k: torch.Tensor  # int64 [P]
    top_p: torch.Tensor  # float32 [P]
    min_p: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """The rows whose token is drawn, not the greatest."""

    rows: torch.Tensor  # int64 [P]
    temperature: torch.Tensor  # float32 [P]
    seeds: torch.Tensor  # int64 [P]
    positions: torch.Tensor  # int64 [P]: tokens of the sequence before the sampled one
    truncation: Truncation | None  # its rows index these P


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """What the sampler needs for R logits rows. A field is None when no row asks for it: greedy steps skip it all."""

    num_logprobs: int  # -1: nobody wants logprobs
    penalties: Penalties | None
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # row, token, amount
    banned: tuple[torch.Tensor, torch.Tensor] | None  # row, token: EOS and stop ids before min_tokens
    draws: Draws | None


GREEDY = SamplingInputs(-1, None, None, None, None)


class SamplingState:
    """Arrays over rows; a row's entries are valid from `start` to the next `start` of the same row."""

    def __init__(self, num_rows: int, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._plain = np.ones(num_rows, bool)  # greedy and nothing else
        self._greedy = np.ones(num_rows, bool)
        self._penalized = np.zeros(num_rows, bool)
        self._truncated = np.zeros(num_rows, bool)
        self._floats = np.zeros((num_rows, 6), np.float32)  # temperature, top_p, min_p, repetition, presence, frequency
        self._top_k = np.zeros(num_rows, np.int64)
        self._seeds = np.zeros(num_rows, np.int64)
        self._num_logprobs = np.full(num_rows, -1, np.int64)
        self._ban_until = np.zeros(num_rows, np.int64)  # sequence length below which `_banned` must not be sampled
        self._banned: list[tuple[int, ...]] = [()] * num_rows
        self._bias: list[dict[int, float]] = [{} for _ in range(num_rows)]
        self._sample_seeds: list[tuple[int, ...]] = [()] * num_rows
        self._prompt_seen: torch.Tensor | None = None  # bool [num_rows, V], with the first penalty
        self._output_counts: torch.Tensor | None = None  # int32 [num_rows, V]

    def start(self, row: int, start: SequenceStart) -> None:
        """Set a row from scratch."""
        params = start.sampling
        self._floats[row] = (
            params.temperature, params.top_p, params.min_p,
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
        )  # fmt: skip
        self._greedy[row] = params.greedy
        self._penalized[row] = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
            1,
            0,
            0,
        )
        self._top_k[row] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._truncated[row] = self._top_k[row] < self._vocab_size or params.top_p < 1 or params.min_p > 0
        self._seeds[row] = _wrap_64(start.seed)
        self._sample_seeds[row] = tuple(map(_wrap_64, start.num_sample_seeds))
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._bias[row] = params.logit_bias
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        self._banned[row] = tuple(sorted(ends)) if params.min_tokens else ()
        self._ban_until[row] = start.num_prompt_tokens + params.min_tokens if self._banned[row] else 0
        self._plain[row] = params.greedy and not (
            self._penalized[row] or params.logit_bias or self._banned[row] or params.logprobs is not None
        )
        if self._penalized[row]:
            self._count_tokens(row, start)

    def num_logprobs(self, row: int) -> int:
        """How many alternatives the row wants; -1 when it wants no logprobs at all."""
        return int(self._num_logprobs[row])

    def prepare(self, rows: Ints, lengths: Ints, num_samples: Sequence[int]) -> SamplingInputs:
        """Inputs for logits of `rows`; `lengths`: tokens of each sequence before the sampled one.

        A row with several samples comes several times in a row; its i-th sample uses the i-th of its sample seeds.
        """
        if self._plain[rows].all():
            return GREEDY
        return SamplingInputs(
            num_logprobs=int(self._num_logprobs[rows].max()),
            penalties=self._prepare_penalties(rows),
            bias=self._prepare_bias(rows),
            banned=self._prepare_bans(rows, lengths),
            draws=self._prepare_draws(rows, lengths, num_samples),
        )

    def count_sampled(self, rows: Ints, token_ids: torch.Tensor) -> None:
        """Remember the sampled tokens (int64 [len(rows)], on the device) of rows with penalties."""
        penalized = np.flatnonzero(self._penalized[rows])
        if len(penalized) and self._output_counts is not None:
            index = self._move(rows[penalized]), token_ids[self._move(penalized)]
            self._output_counts.index_put_(
                index, torch.ones((), dtype=torch.int32, device=self._device), accumulate=True
            )

    def _resolve_seeds(self, rows: Ints, num_samples: Sequence[int]) -> Ints:
        seeds = self._seeds[rows]
        if any(count > 1 for count in num_samples):
            at = 0
            for count in num_samples:
                if count > 1:
                    seeds[at : at + count] = self._sample_seeds[rows[at]]
                at += count
        return seeds

    def _prepare_penalties(self, rows: Ints) -> Penalties | None:
        found = np.flatnonzero(self._penalized[rows])
        if not len(found) or self._prompt_seen is None or self._output_counts is None:
            return None
        index = self._move(rows[found])
        repetition, presence, frequency = (self._move(self._floats[rows[found], column]) for column in (3, 4, 5))
        return Penalties(
            self._move(found), self._prompt_seen[index], self._output_counts[index], repetition, presence, frequency
        )

    def _prepare_draws(self, rows: Ints, lengths: Ints, num_samples: Sequence[int]) -> Draws | None:
        found = np.flatnonzero(~self._greedy[rows])
        if not len(found):
            return None
        seeds, chosen = self._resolve_seeds(rows, num_samples), rows[found]
        return Draws(
            rows=self._move(found),
            temperature=self._move(self._floats[chosen, 0]),
            seeds=self._move(seeds[found]),
            positions=self._move(lengths[found]),
            truncation=self._prepare_truncation(chosen),
        )

    def _prepare_truncation(self, rows: Ints) -> Truncation | None:
        found = np.flatnonzero(self._truncated[rows])
        if not len(found):
            return None
        chosen = rows[found]
        top_p, min_p = self._move(self._floats[chosen, 1]), self._move(self._floats[chosen, 2])
        return Truncation(self._move(found), self._move(self._top_k[chosen]), top_p, min_p)

    def _prepare_bias(self, rows: Ints) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        entries = [(i, token, amount) for i, row in enumerate(rows) for token, amount in self._bias[row].items()]
        if not entries:
            return None
        at, tokens, amounts = zip(*entries, strict=True)
        return self._move(np.array(at)), self._move(np.array(tokens)), self._move(np.array(amounts, np.float32))

    def _prepare_bans(self, rows: Ints, lengths: Ints) -> tuple[torch.Tensor, torch.Tensor] | None:
        short = np.flatnonzero(lengths < self._ban_until[rows])
        entries = [(i, token) for i in short for token in self._banned[rows[i]]]
        if not entries:
            return None
        at, tokens = zip(*entries, strict=True)
        return self._move(np.array(at)), self._move(np.array(tokens))

    def _count_tokens(self, row: int, start: SequenceStart) -> None:
        if self._prompt_seen is None or self._output_counts is None:
            shape = (len(self._seeds), self._vocab_size)
            self._prompt_seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        prompt = np.array(start.token_ids[: start.num_prompt_tokens], np.int64)
        output = np.array(start.token_ids[start.num_prompt_tokens :], np.int64)
        self._prompt_seen[row] = False
        self._prompt_seen[row, self._move(prompt)] = True
        self._output_counts[row] = self._move(np.bincount(output, minlength=self._vocab_size).astype(np.int32))

    def _move(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _wrap_64(seed: int) -> int:
    """Any integer's low 64 bits as a signed one."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low
