"""Graphs of steps without a GPU: a function that is called again in place of a graph that is replayed.

Attention is in plain torch. As captured kernels do, it reads lengths and tables from tensors at the time of the call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pd_cluster.worker.cuda_graphs.captured_step import ReplayOutputs
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes, step_sizes
from pd_cluster.worker.cuda_graphs.step_graphs import StepGraphs
from pd_cluster.worker.sampler import Sampled
from pd_kernels import reference
from pd_kernels.chunk_tiles import ChunkTiles
from pd_kernels.torch_attention import TorchAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.worker.cuda_graphs.recorder import Outputs
    from pd_cluster.worker.device_executor import DeviceExecutor
    from pd_cluster.worker.draw_places import CapturedDraw, DrawVariant
    from pd_cluster.worker.step_inputs import ReplayInputs
    from pd_kernels.attention import AttentionPlan, GroupAttention
    from pd_kernels.values import KeysValues, NewTokens, PackedSequences, StepOnDevice, StepSize


@dataclass(frozen=True)
class ReferenceAttention:
    """A GroupAttention that can be captured. `differs`: sizes of far steps are worth a capture.

    Groups with a window have twice as many tiles as others, so a group that gets the tiles of another one is noticed.
    """

    inner: TorchAttention
    differs: bool = True

    def plan(self, packed: PackedSequences) -> AttentionPlan:
        return self.inner.plan(packed)

    def captured(self, size: StepSize) -> ReferenceReplayable | None:
        if size.is_far and not self.differs:
            return None
        window = self.inner.shape.window
        tiles = ChunkTiles(1 << 20, size.num_chunks * (2 if window else 1))
        return ReferenceReplayable(window, tiles, has_drafts=size.has_drafts)


def reference_attentions(executor: DeviceExecutor) -> list[ReferenceAttention]:
    """By KV group."""
    return [captured_as_reference(attention) for attention in executor._plan.attentions]


def captured_as_reference(attention: GroupAttention) -> ReferenceAttention:
    assert isinstance(attention, TorchAttention)
    return ReferenceAttention(attention)


@dataclass(frozen=True)
class ReferenceReplayable:
    """A Replayable. Its kernels read no tiles."""

    window: int
    tiles: ChunkTiles
    has_drafts: bool

    def plan(self, step: StepOnDevice) -> AttentionPlan:
        assert step.tiles.shape == (2, self.tiles.count), "tiles of another group"
        if self.has_drafts:
            return DraftsPlan(step, self.window)
        return StepPlan(step, self.window) if self.tiles.count else DecodesPlan(step, self.window)


@dataclass(frozen=True)
class DecodesPlan:
    """Of a step of decodes alone."""

    step: StepOnDevice
    window: int

    def run(
        self,
        query: torch.Tensor,
        cache: KeysValues,
        scale: float,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.zeros_like(query) if out is None else out.zero_()
        real = self.step.decode_lens > 0
        tables = self.step.block_tables[real].clamp(min=0)
        out[real] = reference.decode_attention(
            query[real], cache, tables, self.step.decode_lens[real], scale, self.window, sinks
        )
        return out

    @property
    def may_rotate(self) -> bool:
        return False

    def run_rotating(
        self, heads: torch.Tensor, new: NewTokens, cache: KeysValues, scale: float, sinks: torch.Tensor | None = None
    ) -> None:
        """Always None."""


@dataclass(frozen=True)
class DraftsPlan(DecodesPlan):
    """Of a step of decodes with drafts alone."""

    def run(
        self,
        query: torch.Tensor,
        cache: KeysValues,
        scale: float,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is None
        step = self.step
        assert not len(step.decode_lens)
        tables = step.block_tables.clamp(min=0)
        given = tables, step.query_starts, step.seq_lens, scale, self.window, sinks
        return reference.draft_attention(query, cache, *given)


@dataclass(frozen=True)
class StepPlan:
    """Of any step."""

    step: StepOnDevice
    window: int

    def run(
        self,
        query: torch.Tensor,
        cache: KeysValues,
        scale: float,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is None
        step = self.step
        num_tokens = int(step.query_starts[-1])
        decodes = step.decode_lens[step.decode_lens > 0]
        assert torch.equal(decodes, step.seq_lens[: len(decodes)])
        assert torch.equal(step.query_starts[: len(decodes) + 1], torch.arange(len(decodes) + 1, dtype=torch.int32))
        found = torch.full_like(query, torch.nan)  # must never be read
        found[:num_tokens] = reference.prefill_attention(
            query[:num_tokens], cache, step.block_tables, step.query_starts, step.seq_lens, scale,
            self.window, sinks=sinks,
        )  # fmt: skip
        return found

    @property
    def may_rotate(self) -> bool:
        return False

    def run_rotating(
        self, heads: torch.Tensor, new: NewTokens, cache: KeysValues, scale: float, sinks: torch.Tensor | None = None
    ) -> None:
        """Always None."""


class Repeater:
    """Records by calling again, into the same tensors."""

    free_bytes = 0

    def __init__(self, room: int) -> None:
        self.room = room
        self.num_replays = 0

    def has_room(self) -> bool:
        self.room -= 1
        return self.room >= 0

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        outputs = run()

        def replay() -> None:
            self.num_replays += 1
            for place, value in zip(tensors_of(outputs), tensors_of(run()), strict=True):
                place.copy_(value)

        return replay, outputs


def tensors_of(outputs: object) -> list[torch.Tensor]:
    if isinstance(outputs, Sampled):
        values = (outputs.token_ids, outputs.logprobs, outputs.top_ids, outputs.top_logprobs)
        return [tensor for tensor in values if tensor is not None]
    assert isinstance(outputs, ReplayOutputs)
    return [*outputs]


@dataclass
class Repeated:
    """An executor's graphs that are none."""

    graphs: StepGraphs
    lines: list[str]  # what the capture told
    replayed: list[StepSize] = field(default_factory=list)  # the size of each replayed step
    drawn: list[DrawVariant] = field(default_factory=list)  # the variant of each replayed draw


def near_sizes(limit: int, max_seqs: int) -> list[StepSize]:
    """Those of `step_sizes` that are not for far chunks."""
    return [size for size in step_sizes(limit, max_seqs) if not size.is_far]


def step_graphs(executor: DeviceExecutor, attentions: Sequence[GroupAttention]) -> StepGraphs:
    """For the executor's steps, without graphs yet."""
    runner = executor._runner
    return StepGraphs(
        executor._weights.model, executor._cache, runner.rows, runner.host_buffer, runner._sampler, attentions
    )


def with_graphs(executor: DeviceExecutor, sizes: list[StepSize], room: int = 100) -> Repeated:
    """Let the executor replay steps of these sizes, as if its warm-up had captured them."""
    runner, lines = executor._runner, list[str]()
    graphs = step_graphs(executor, reference_attentions(executor))
    graphs.capture(sizes, Repeater(room), lines.append)
    runner.graphs, executor._graph_sizes = graphs, GraphSizes(graphs.sizes)
    runner.draws._graphs.clear()  # of a call before
    runner.draws.capture(graphs.logits, Repeater(1 << 20), lambda _: None)
    repeated, replay, draw = Repeated(graphs, lines), graphs.replay, runner.draws.replay

    def noted(inputs: ReplayInputs, size: StepSize) -> ReplayOutputs:
        repeated.replayed.append(size)
        outputs = replay(inputs, size)
        return ReplayOutputs(outputs.logits, outputs.token_ids.clone())  # as the copy to the host does on a device

    def noted_draw(inputs: CapturedDraw, size: StepSize, count: int) -> Sampled:
        repeated.drawn.append(inputs.variant)
        return draw(inputs, size, count)._map(torch.Tensor.clone)

    graphs.replay = noted  # type: ignore[method-assign]
    runner.draws.replay = noted_draw  # type: ignore[method-assign, assignment]
    return repeated
