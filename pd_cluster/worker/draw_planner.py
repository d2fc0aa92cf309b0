"""Which samples of a step are drawn when, and by what: launches, or a captured draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.worker.step_inputs import Part
from pd_cluster.worker.verification import tokens_before

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pd_cluster.worker.cuda_graphs.captured_step import StepPlaces
    from pd_cluster.worker.draw_places import CapturedDraw, DrawLayout
    from pd_cluster.worker.sample_planner import SamplePlanner
    from pd_cluster.worker.sampling_state import SamplingInputs, SamplingState
    from pd_cluster.worker.step_inputs import Samples
    from pd_kernels.values import Ints


class DrawPlanner:
    """Parts the samples of a step, and makes what their draws need. `num_on_host`: tokens of each row on the host."""

    def __init__(
        self,
        sampling: SamplingState,
        samples: SamplePlanner,
        num_on_host: Ints,
        move: Callable[[Ints], torch.Tensor],
    ) -> None:
        self._sampling, self._samples, self._num_on_host, self._move = sampling, samples, num_on_host, move

    def without_absent(self, part: Part) -> Part:
        """The samples of a late part that can be drawn now. Late stages wait for their masks."""
        samples = part.samples
        assert (self._num_on_host[samples.rows] >= samples.positions).all(), "at most one step is under way beside it"
        absent = self._sampling.absent(samples.rows)
        if not absent.any():
            return part
        kept = self._samples.part(samples, ~absent)
        if part.places is None or kept.places is None:
            return kept
        places = part.places[kept.places]
        return Part(kept.samples, places, self._move(places))

    def split(self, samples: Samples) -> tuple[Part | None, Part | None]:
        """Part the samples. -> the early ones, those of rows with a late stage."""
        are_late = self._sampling.are_late(samples.rows)
        if not are_late.any():
            return Part(samples, None, None) if len(samples) else None, None
        if samples.drafts:
            drafted = np.flatnonzero(samples.lens > 1)
            rows, are_known = samples.rows[drafted], self._num_on_host[samples.rows] >= samples.positions
            self._sampling.expect(rows, [samples.drafts[at] for at in drafted], are_known[drafted])
        if are_late.all():
            return None, Part(samples, None, None)
        return self._samples.part(samples, ~are_late), self._samples.part(samples, are_late)

    def plan(self, part: Part, draws: DrawLayout | None) -> SamplingInputs | CapturedDraw:
        """Make the inputs of the part's draw: of a captured one, if `draws` is its layout and it can draw all rows."""
        samples = part.samples
        if samples.drafts and self._sampling.are_changed(samples.rows[samples.lens > 1]).any():
            draws = None  # stages would have to know the drafts before each row
        captured = self._sampling.capture(samples.draw_rows, samples.draw_positions, part.places, draws)
        return self.prepare(samples) if captured is None else captured

    def plan_captured(
        self, early: Part | None, places: StepPlaces, draws: DrawLayout | None
    ) -> SamplingInputs | CapturedDraw | None:
        """Decide how the early samples of a captured step are drawn: by its own graph, by another, or by launches."""
        if early is None:
            return None
        if (drawn := self._sampling.plain_draws(early.samples.draw_rows)) is not None:
            at = slice(len(early.samples.draw_rows)) if early.places is None else early.places
            places.temperatures.view(np.float32)[at], places.seeds[at] = drawn
            return None
        return self.plan(early, draws)

    def prepare(self, samples: Samples) -> SamplingInputs:
        """Make the sampler's inputs. All tokens of rows with a late stage must be on the host."""
        rows, positions, drafts = samples.draw_rows, samples.draw_positions, samples.drafts
        if not drafts:
            return self._sampling.prepare(rows, positions, samples.counts)
        pairs = tuple(zip(drafts, samples.counts, strict=True))
        before = tokens_before([one for one, count in pairs for _ in range(1 if one else count)])
        counts = [each for one, count in pairs for each in ([1] * count if one else [count])]
        return self._sampling.prepare(rows, positions, counts, before)
