"""Graphs of steps without a GPU: a function that is called again in place of a graph that is replayed.

Attention is in plain torch. As captured kernels do, it reads lengths and tables from tensors at the time of the call.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.worker.cuda_graphs.captured_step import ReplayOutputs
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes
from pd_cluster.worker.cuda_graphs.step_graphs import StepGraphs
from pd_kernels import reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.worker.cuda_graphs.recorder import Outputs
    from pd_cluster.worker.device_executor import DeviceExecutor
    from pd_cluster.worker.input_batch import ReplayInputs
    from pd_kernels.backends import Kernels
    from pd_kernels.values import Ints, PackedSequences, StepOnDevice, StepSize


@dataclass(frozen=True)
class DevicePlan:
    """Attention of decodes alone."""

    packed: PackedSequences
    window: int

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.zeros_like(query) if out is None else out.zero_()
        real = self.packed.seq_lens > 0
        tables = self.packed.block_tables[real].clamp(min=0)
        out[real] = reference.decode_attention(
            query[real], key_cache, value_cache, tables, self.packed.seq_lens[real], scale, self.window
        )
        return out


def plan_on_device(packed: PackedSequences, key_cache: torch.Tensor, window: int = 0) -> DevicePlan:
    assert not (packed.host_seq_lens - 1).any(), "of a padded step the host knows no lengths"
    return DevicePlan(packed, window)


@dataclass(frozen=True)
class ReferencePlan:
    """Attention of a step with chunks."""

    step: StepOnDevice
    window: int

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is None
        step = self.step
        num_tokens = int(step.query_starts[-1])
        decodes = step.decode_lens[step.decode_lens > 0]
        assert torch.equal(decodes, step.seq_lens[: len(decodes)])
        assert torch.equal(step.query_starts[: len(decodes) + 1], torch.arange(len(decodes) + 1, dtype=torch.int32))
        found = torch.full_like(query, torch.nan)  # must never be read
        found[:num_tokens] = reference.prefill_attention(
            query[:num_tokens], key_cache, value_cache, step.block_tables, step.query_starts, step.seq_lens, scale,
            self.window,
        )  # fmt: skip
        return found


@dataclass(frozen=True)
class ReferenceReplayable:
    """backends.Replayable in plain torch. It has no tiles, so they hold only the number of their sequence."""

    is_far: bool
    num_tiles: int = 2

    def tiles(self, query_lens: Ints, seq_lens: Ints, num_decodes: int, padding_seq: int) -> Ints:
        return np.array([[num_decodes, padding_seq], [0, 0]])

    def plan(self, step: StepOnDevice, key_cache: torch.Tensor, window: int = 0) -> ReferencePlan:
        return ReferencePlan(step, window)


def replayable(kernels: Kernels) -> Kernels:
    return replace(kernels, replayable=lambda size, num_heads, key_cache, windowed: ReferenceReplayable(size.is_far))


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


def tensors_of(outputs: object) -> ReplayOutputs:
    assert isinstance(outputs, ReplayOutputs)
    return outputs


@dataclass
class Repeated:
    """An executor's graphs that are none."""

    graphs: StepGraphs
    lines: list[str]  # what the capture told
    replayed: list[StepSize] = field(default_factory=list)  # the size of each replayed step


def with_graphs(executor: DeviceExecutor, sizes: list[StepSize], room: int = 100) -> Repeated:
    """Let the executor replay steps of these sizes, as if its warm-up had captured them."""
    runner, lines = executor._runner, list[str]()
    kernels = replace(replayable(executor._kernels), plan_attention=plan_on_device)
    graphs = StepGraphs(executor._model, executor._cache, runner.rows, runner.host_buffer, kernels)
    graphs.capture(sizes, Repeater(room), lines.append)
    runner.graphs, executor._graph_sizes = graphs, GraphSizes(graphs.sizes)
    repeated, replay = Repeated(graphs, lines), graphs.replay

    def noted(inputs: ReplayInputs, size: StepSize) -> ReplayOutputs:
        repeated.replayed.append(size)
        outputs = replay(inputs, size)
        return ReplayOutputs(outputs.logits, outputs.token_ids.clone())  # as the copy to the host does on a device

    graphs.replay = noted  # type: ignore[method-assign]
    return repeated
