"""Each live sequence's sampling settings, as arrays over rows, and the inputs that one step's sampler needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.worker.penalties import PenaltyTables
from pd_cluster.worker.token_lists import TokenList, entries_of, shifts_of
from pd_kernels.values import Draws, Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.host_buffer import HostBuffer
    from pd_cluster.worker.penalties import Penalties
    from pd_cluster.worker.token_lists import Entries, Shift
    from pd_kernels.values import Ints


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """What the sampler needs for R logits rows. A field is None when no row asks for it: greedy steps skip it all."""

    num_logprobs: int  # -1: nobody wants logprobs
    penalties: Penalties | None
    bias: Entries | None
    banned: Entries | None  # EOS and stop ids before min_tokens; their amounts are -inf
    draws: Draws | None  # None in GREEDY alone
    shifts: tuple[Shift, ...] = ()  # biases and bans of requests that name many tokens

    @property
    def changes_logits(self) -> bool:
        """Before anything is chosen from them."""
        return bool(self.penalties or self.bias or self.banned or self.shifts)


GREEDY = SamplingInputs(-1, None, None, None, None)


class SamplingState:
    """Arrays over rows; a row's entries are valid from `start` to the next `start` of the same row."""

    def __init__(
        self, num_rows: int, vocab_size: int, eos_token_ids: frozenset[int], staging: HostBuffer, device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._eos_token_ids = eos_token_ids
        self._move = staging.move
        self._penalties = PenaltyTables(num_rows, vocab_size, device)
        self._plain = np.ones(num_rows, bool)  # temperature and seed say all
        self._limited = np.zeros(num_rows, bool)
        self._temperature = np.zeros(num_rows, np.float32)  # 0: greedy
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seeds = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.full(num_rows, -1, np.int64)  # alternatives that the row wants; -1: no logprobs at all
        self._ban_until = np.zeros(num_rows, np.int64)  # sequence length below which `_banned` must not be sampled
        self._params: list[SamplingParams | None] = [None] * num_rows  # whose lists a row has
        self._banned: list[TokenList | None] = [None] * num_rows
        self._bias: list[TokenList | None] = [None] * num_rows
        self._is_biased = np.zeros(num_rows, bool)
        self._sample_seeds: list[tuple[int, ...]] = [()] * num_rows

    def start(self, row: int, start: SequenceStart) -> None:
        """Set a row from scratch."""
        params = start.sampling
        self._temperature[row] = 0 if params.greedy else params.temperature
        self._top_k[row] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[row], self._min_p[row] = params.top_p, params.min_p
        is_limited = self._top_k[row] < self._vocab_size or params.top_p < 1 or params.min_p > 0
        self._limited[row] = is_limited and not params.greedy
        self._seeds[row] = _wrap_64(start.seed)
        self._sample_seeds[row] = tuple(map(_wrap_64, start.num_sample_seeds))
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._start_lists(row, params)
        bias, banned = self._bias[row], self._banned[row]
        self._is_biased[row] = bias is not None
        self._ban_until[row] = 0 if banned is None else start.num_prompt_tokens + params.min_tokens
        changed = self._penalties.start(row, start) or bias is not None or banned is not None
        self._plain[row] = not (self._limited[row] or changed or params.logprobs is not None)

    def _start_lists(self, row: int, params: SamplingParams) -> None:
        """The request's lists: those of another of its sequences, if one has a row."""
        if not (params.logit_bias or params.min_tokens):
            self._params[row] = self._bias[row] = self._banned[row] = None
            return
        twin = next((other for other, known in enumerate(self._params) if known is params), None)
        self._params[row] = params
        if twin is not None:
            self._bias[row], self._banned[row] = self._bias[twin], self._banned[twin]
            return
        make = partial(TokenList.make, vocab_size=self._vocab_size, device=self._device)
        bias = params.logit_bias
        tokens = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias[row] = make(tokens, np.fromiter(bias.values(), np.float32, len(bias))) if bias else None
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        banned = np.array(sorted(ends) if params.min_tokens else [], np.int64)
        self._banned[row] = make(banned, np.full(len(banned), -np.inf, np.float32)) if len(banned) else None

    def plain_draws(self, rows: Ints) -> tuple[npt.NDArray[np.float32], Ints] | None:
        """Temperatures (0: greedy) and seeds of `rows` with one sample each, if nothing else is asked for any."""
        return (self._temperature[rows], self._seeds[rows]) if self._plain[rows].all() else None

    def prepare(self, rows: Ints, lengths: Ints, num_samples: Sequence[int]) -> SamplingInputs:
        """Inputs for logits of `rows`; `lengths`: tokens of each sequence before the sampled one.

        A row with several samples comes several times in a row; its i-th sample uses the i-th of its sample seeds.
        """
        if self._plain[rows].all() and not self._temperature[rows].any():
            return GREEDY
        biased, short = np.flatnonzero(self._is_biased[rows]), np.flatnonzero(lengths < self._ban_until[rows])
        bias = [(i, one) for i in biased.tolist() if (one := self._bias[rows[i]]) is not None]
        banned = [(i, one) for i in short.tolist() if (one := self._banned[rows[i]]) is not None]
        return SamplingInputs(
            num_logprobs=int(self.num_logprobs[rows].max()),
            penalties=self._penalties.prepare(rows),
            bias=entries_of(bias, self._move),
            banned=entries_of(banned, self._move),
            draws=self._prepare_draws(rows, lengths, num_samples),
            shifts=shifts_of(bias, self._move) + shifts_of(banned, self._move),
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

    def count_sampled(self, rows: Ints, token_ids: torch.Tensor) -> None:
        """Each of `rows` (distinct) goes on with the token in `token_ids` (int64 [len(rows)], on the device)."""
        self._penalties.count(rows, token_ids)

    def _prepare_draws(self, rows: Ints, lengths: Ints, num_samples: Sequence[int]) -> Draws:
        limits = None
        if len(found := np.flatnonzero(self._limited[rows])):
            bounds = (values[rows[found]] for values in (self._top_k, self._top_p, self._min_p))
            limits = Limits(*map(self._move, (found, *bounds)))
        seeds = self._resolve_seeds(rows, num_samples)
        return Draws(self._move(self._temperature[rows]), self._move(seeds), self._move(lengths), limits)


def _wrap_64(seed: int) -> int:
    """Any integer's low 64 bits as a signed one."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low
