"""Draws that need more than temperature and seed, as CUDA graphs after the graphs of steps.

The graph of a step ends with logits and with a draw for temperature and seed alone. If a row asks for more, a second
graph draws all rows again from these logits, and overwrites the tokens in `InputBatch.last_tokens`. It reads its other
inputs from one array (`DrawLayout`), masks of tokens, and the tables of penalties, in which it counts the tokens that
it draws. Rows with a late stage, as grammars have, are drawn by a replay of their own, in which the others are padding.

There are graphs for each number of decodes, because each graph of decodes keeps logits of its own, and as many for the
logits that all other graphs of steps share, with more rows where these have drafts. Each number has eight: with and
without changes to the logits, which need a copy in float32, logprobs, which need the best 20 tokens, and masks.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from pd_cluster.scheduling.captured_sizes import bucket_sizes
from pd_cluster.worker.draw_places import DrawVariant
from pd_cluster.worker.sampler import Sampled, most_logprobs
from pd_kernels.values import Draws, Limits, TokenMasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd_cluster.worker.cuda_graphs.recorder import Recorder
    from pd_cluster.worker.draw_places import CapturedDraw, DrawLayout
    from pd_cluster.worker.logits_stages.penalties import PenaltyTables
    from pd_kernels.backends import Kernels
    from pd_kernels.values import StepSize

VARIANTS = tuple(DrawVariant(*reversed(told)) for told in product((False, True), repeat=3))


class _Draw(NamedTuple):
    """A draw of all rows of one tensor of logits."""

    is_shared: bool  # of the logits that steps share, which are not decodes alone
    num_rows: int
    variant: DrawVariant


class DrawGraphs:
    """The captured draws of one worker. Their replays follow those of steps on one stream."""

    def __init__(
        self,
        layout: DrawLayout,
        last_tokens: torch.Tensor,
        penalty_tables: Callable[[], PenaltyTables],
        kernels: Kernels,
    ) -> None:
        """There are no graphs until `capture`. `last_tokens`: of InputBatch."""
        self._layout = layout
        self._last_tokens = last_tokens
        self._penalty_tables = penalty_tables
        self._kernels = kernels
        self._fields = torch.from_numpy(layout.padded()).to(last_tokens.device)
        self._places = layout.places(self._fields, torch.float32)
        self._masks = torch.zeros(
            (layout.num_rows, -(-layout.vocab_size // 32)), dtype=torch.int32, device=last_tokens.device
        )
        self._graphs: dict[_Draw, tuple[Callable[[], None], Sampled]] = {}

    @property
    def layout(self) -> DrawLayout | None:
        """The layout of the draws' inputs; None: nothing was captured."""
        return self._layout if self._graphs else None

    @torch.inference_mode()
    def capture(
        self, logits: dict[StepSize, torch.Tensor], recorder: Recorder, progress: Callable[[str], None]
    ) -> None:
        """Capture the draws from the logits [R, V] of each captured size, or none if there is no memory for all.

        Call it once. Until the first replay the draws' inputs are those of padding.
        """
        started_s, free, tables = time.perf_counter(), recorder.free_bytes, self._penalty_tables()
        for is_shared, rows in self._sources(logits):
            for variant in VARIANTS:
                if not recorder.has_room():
                    self._graphs.clear()
                    progress("no memory for graphs of draws: top k, penalties and logprobs take more launches")
                    return
                run = partial(self._run, rows, variant, tables)
                self._graphs[_Draw(is_shared, len(rows), variant)] = recorder(run)
        used_gb = (free - recorder.free_bytes) / 1e9
        progress(f"{len(self._graphs)} graphs of draws in {time.perf_counter() - started_s:.1f} s and {used_gb:.2f} GB")

    def replay(self, draw: CapturedDraw, size: StepSize, count: int) -> Sampled:
        """Draw the `count` logits rows that a step of `size` has just computed."""
        self._fields[: len(draw.fields)].copy_(draw.fields)
        if draw.masks is not None:
            self._masks[: len(draw.masks)].copy_(draw.masks)
        num_rows = size.num_seqs
        if not size.is_plain:
            num_rows = min(each.num_rows for each in self._graphs if each.is_shared and each.num_rows >= count)
        replay, sampled = self._graphs[_Draw(not size.is_plain, num_rows, draw.variant)]
        replay()
        return sampled.first(count)

    def _sources(self, logits: dict[StepSize, torch.Tensor]) -> Iterator[tuple[bool, torch.Tensor]]:
        """Yield the logits to draw from, the largest first, each with whether steps share them."""
        sources = [(False, rows) for size, rows in logits.items() if size.is_plain]
        if shared := {size: rows for size, rows in logits.items() if not size.is_plain}:
            largest, seqs = max(shared.values(), key=len), max(size.num_seqs for size in shared)
            buckets = {*bucket_sizes(seqs), *(size.num_tokens for size in shared if size.has_drafts)}
            sources += [(True, largest[:num_rows]) for num_rows in buckets]
        yield from sorted(sources, key=lambda source: -len(source[1]))

    def _run(self, logits: torch.Tensor, variant: DrawVariant, tables: PenaltyTables) -> Sampled:
        """The work that a graph captures, for all R rows of `logits`."""
        kernels, places = self._kernels, self._places.first(len(logits))
        changed = logits
        if variant.has_changes:
            changed = logits.to(torch.float32, copy=True)
            kernels.penalize(changed, tables.seen, tables.counts, places.settings, places.owners)
            changed.view(-1).scatter_add_(0, places.entries, places.amounts)
        limits = Limits(places.top_k, places.top_p, places.min_p)
        masks = TokenMasks(self._masks, places.masks) if variant.has_masks else None
        token_ids = kernels.draw(changed, Draws(places.temperature, places.seeds, places.positions, limits, masks))
        self._last_tokens.index_copy_(0, places.owners, token_ids)
        if variant.has_changes:
            tables.note(places.counted, token_ids)
        if not variant.has_logprobs:
            return Sampled(token_ids)
        return Sampled(token_ids, *kernels.logprobs(logits, token_ids, most_logprobs(logits)))
