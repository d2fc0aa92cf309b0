"""Each live sequence's sampling settings, as arrays over rows, and the inputs that one step's sampler needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from pd_cluster.worker.draw_places import CapturedDraw, DrawChanges, DrawVariant
from pd_cluster.worker.logits_stages.stage import CapturedStage
from pd_kernels.values import Draws, Limits, TokenMasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd_cluster.errors import PdError
    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.draw_places import DrawLayout
    from pd_cluster.worker.host_buffer import HostBuffer
    from pd_cluster.worker.logits_stages.stage import LateStage, LogitsStage
    from pd_kernels.values import Ints


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The sampler's inputs for R logits rows."""

    has_logprobs: bool  # a row asks for logprobs
    changes: tuple[tuple[LogitsStage, Any], ...]  # stages that change the logits, in order, with their inputs
    draws: Draws | None  # None only in GREEDY
    failures: dict[int, PdError] = field(default_factory=dict)  # rows that cannot go on, with the reason
    is_plain: bool = False  # no row asks for more than temperature and seed; the same on every rank


GREEDY = SamplingInputs(False, (), None, is_plain=True)  # every row takes its best token, and nothing else is asked for


class SamplingState:
    """The sampling settings of the live sequences, as arrays over rows.

    A row's entries are valid from `start` to the next `start` of the same row.
    """

    def __init__(self, num_rows: int, vocab_size: int, stages: Sequence[LogitsStage], host_buffer: HostBuffer) -> None:
        self._vocab_size = vocab_size
        self._move, self._move_rows = host_buffer.move, host_buffer.move_rows
        self._stages = [(stage, np.zeros(num_rows, bool)) for stage in stages]  # each with its active rows
        self._late_stages = [(cast("LateStage", stage), active) for stage, active in self._stages if stage.is_late]
        self._changed = np.zeros(num_rows, bool)  # any stage is active
        self._late = np.zeros(num_rows, bool)  # a late one is
        self._plain = np.ones(num_rows, bool)  # nothing but temperature and seed is asked for
        self._limited = np.zeros(num_rows, bool)  # top k, top p or min p
        self._temperature = np.zeros(num_rows, np.float32)  # 0: greedy
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seeds = np.zeros(num_rows, np.int64)
        self._sample_seeds: list[tuple[int, ...]] = [()] * num_rows
        self.num_logprobs = np.full(num_rows, -1, np.int64)  # alternatives that the row wants; -1: no logprobs at all

    def start(self, row: int, start: SequenceStart) -> None:
        """Set the entries of `row` for a new sequence."""
        params = start.sampling
        self._temperature[row] = 0 if params.greedy else params.temperature
        self._top_k[row] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[row], self._min_p[row] = params.top_p, params.min_p
        is_limited = self._top_k[row] < self._vocab_size or params.top_p < 1 or params.min_p > 0
        self._limited[row] = is_limited and not params.greedy
        self._seeds[row] = _wrap_64(start.seed)
        self._sample_seeds[row] = tuple(map(_wrap_64, start.num_sample_seeds))
        self.num_logprobs[row] = -1 if params.num_alternatives is None else params.num_alternatives
        self._changed[row] = self._late[row] = False
        for stage, active in self._stages:
            active[row] = stage.start(row, start)
            self._changed[row] |= active[row]
            self._late[row] |= active[row] and stage.is_late
        self._plain[row] = not (self._limited[row] or self._changed[row] or params.num_alternatives is not None)

    def plain_draws(self, rows: Ints) -> tuple[npt.NDArray[np.float32], Ints] | None:
        """Temperatures (0: greedy) and seeds of `rows`, each for one draw; None if any row asks for more."""
        return (self._temperature[rows], self._seeds[rows]) if self._plain[rows].all() else None

    def prepare(
        self, rows: Ints, lengths: Ints, num_samples: Sequence[int], before: Ints | None = None
    ) -> SamplingInputs:
        """Make the sampler's inputs for logits of `rows`; `lengths`: tokens of each sequence before the sampled one.

        A row with several samples occurs once for each, in neighbouring places. The i-th uses the i-th sample seed.
        before: the drafts before each row of logits; None: there are none. See `LogitsStage.prepare_behind`.
        """
        is_plain = bool(self._plain[rows].all())
        if is_plain and not self._temperature[rows].any():
            return GREEDY
        changes = []
        for stage, active in self._stages:
            if active[rows].any():
                args = rows, lengths
                inputs = stage.prepare(*args) if before is None else stage.prepare_behind(*args, before)
                if inputs is not None:
                    changes.append((stage, inputs))
        masks = None
        if changes and isinstance(changes[-1][1], TokenMasks):  # the draw itself reads them, and copies no logits
            masks = changes.pop()[1]
        return SamplingInputs(
            has_logprobs=bool((self.num_logprobs[rows] >= 0).any()),
            changes=tuple(changes),
            draws=self._prepare_draws(rows, lengths, num_samples, masks),
            failures=self._take_failures(),
            is_plain=is_plain,
        )

    def capture(self, rows: Ints, lengths: Ints, at: Ints | None, layout: DrawLayout | None) -> CapturedDraw | None:
        """Make the inputs of a captured draw for `rows`. `at`: their rows in the logits of the step; None: the first.

        `lengths` as for `prepare`; each row has one sample. None if a captured draw cannot draw all of them, or if
        there are none (`layout` is None).
        """
        if layout is None:
            return None
        at = np.arange(len(rows)) if at is None else at
        fields = layout.padded()
        places = layout.places(fields, np.float32)
        changes = DrawChanges(places, at, layout.vocab_size)
        for stage, active in self._stages:
            if not active[rows].any():
                continue
            if not isinstance(stage, CapturedStage) or not stage.fold(rows, lengths, changes):
                return None
        places.owners[at], places.positions[at], places.seeds[at] = rows, lengths, self._seeds[rows]
        places.temperature[at], places.top_k[at] = self._temperature[rows], self._top_k[rows]
        places.top_p[at], places.min_p[at] = self._top_p[rows], self._min_p[rows]
        masks = changes.take_masks()
        variant = DrawVariant(not changes.is_empty, bool((self.num_logprobs[rows] >= 0).any()), bool(masks))
        return CapturedDraw(
            variant,
            self._move(layout.used(fields, has_changes=variant.has_changes)),
            self._move_rows(masks) if masks else None,
            self._take_failures(),
        )

    def are_changed(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Which of `rows` have an active stage."""
        changed: npt.NDArray[np.bool_] = self._changed[rows]
        return changed

    def are_late(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Which of `rows` have an active late stage."""
        are_late: npt.NDArray[np.bool_] = self._late[rows]
        return are_late

    def expect(self, rows: Ints, drafts: Sequence[tuple[int, ...]], are_known: npt.NDArray[np.bool_]) -> None:
        """Tell the late stages the drafts of a step: see `LateStage.expect`."""
        for stage, active in self._late_stages:
            if len(at := np.flatnonzero(active[rows])):
                stage.expect(rows[at], [drafts[one] for one in at], are_known[at])

    def absent(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Which of `rows` (distinct) sit out this draw, because a late stage is not ready for them."""
        found = set[int]()
        for stage, active in self._late_stages:
            if len(own := rows[active[rows]]):
                found |= stage.absent(own)
        return np.isin(rows, list(found))

    def is_unready(self, row: int) -> bool:
        """Whether a late stage of a row asks the next step to leave it out."""
        return any(active[row] and stage.is_unready(row) for stage, active in self._late_stages)

    def note_sampled(self, rows: Ints, token_ids: torch.Tensor) -> None:
        """Tell the stages that each of `rows` (distinct) continues with its token.

        `token_ids`: int64 [len(rows)], on the device.
        """
        if self._changed[rows].any():
            for stage, active in self._stages:
                if not stage.is_late and active[rows].any():
                    stage.note(rows, token_ids)

    def note_read(self, rows: Ints, token_ids: Ints) -> None:
        """Tell the late stages the same tokens (int64 [len(rows)]), when they are in host memory; runs in one call."""
        for stage, active in self._late_stages:
            if active[rows].any():
                stage.note(rows, torch.from_numpy(token_ids))

    def _take_failures(self) -> dict[int, PdError]:
        return {row: why for stage, _ in self._late_stages for row, why in stage.take_failures().items()}

    def _resolve_seeds(self, rows: Ints, num_samples: Sequence[int]) -> Ints:
        seeds = self._seeds[rows]
        if any(count > 1 for count in num_samples):
            at = 0
            for count in num_samples:
                if count > 1:
                    seeds[at : at + count] = self._sample_seeds[rows[at]]
                at += count
        return seeds

    def _prepare_draws(self, rows: Ints, lengths: Ints, num_samples: Sequence[int], masks: TokenMasks | None) -> Draws:
        limits = None
        if self._limited[rows].any():
            limits = Limits(*(self._move(values[rows]) for values in (self._top_k, self._top_p, self._min_p)))
        seeds = self._resolve_seeds(rows, num_samples)
        return Draws(self._move(self._temperature[rows]), self._move(seeds), self._move(lengths), limits, masks)


def _wrap_64(seed: int) -> int:
    """The low 64 bits of any integer, as a signed number."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low
