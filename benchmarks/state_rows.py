"""Times the gated delta rule of a layer of Qwen3.6-35B-A3B: decodes and prompts, and the convolution before it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from benchmarks.kernel_time import KernelTime, seconds_of
from pd_kernels.state import PIECE, StateCache, StatePlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_kernels.state import StateOps

KEY_HEADS, VALUE_HEADS, SIZE, WIDTH = 16, 32, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
STEPS = ((1, 1), (32, 1), (128, 1), (256, 1), (1, 4096), (64, 1024), (1, 65536))  # sequences, tokens of each
LAYERS = 3  # of which no two are in the L2 cache at once where there are many sequences


class _Layer(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    cache: StateCache
    plan: StatePlan

    def convolve(self, ops: StateOps) -> torch.Tensor:
        return ops.convolve(self.x, self.weight, None, self.cache, self.plan)

    def mix(self, ops: StateOps) -> torch.Tensor:
        keys = KEY_HEADS * SIZE
        q, k, v = (part.view(len(part), -1, SIZE) for part in self.x.tensor_split((keys, 2 * keys), 1))
        return ops.mix(q, k, v, self.g, self.beta, self.cache.recurrent, self.plan, SIZE**-0.5)


def state_rows(ops: StateOps) -> Iterator[KernelTime]:
    """Bytes of decodes are those of states, FLOPs of prompts those of the pieces' products without the inverse."""
    for num_seqs, count in STEPS:
        layers = [_make(num_seqs, count) for _ in range(LAYERS)]
        tokens, size = num_seqs * count, 2 * num_seqs * VALUE_HEADS * SIZE * SIZE * 4.0
        rows = tokens * (CHANNELS + VALUE_HEADS * SIZE) * 2.0
        flops = tokens * VALUE_HEADS * 2.0 * (4 * PIECE * SIZE + 3 * SIZE * SIZE) if count > 1 else 0.0
        name = f"{num_seqs} x {count}"
        yield KernelTime(
            f"delta rule {name}", seconds_of([partial(one.mix, ops) for one in layers]), size + rows, flops
        )
        seconds = seconds_of([partial(one.convolve, ops) for one in layers])
        yield KernelTime(f"convolution {name}", seconds, 4.0 * tokens * CHANNELS, 0.0)


def _make(num_seqs: int, count: int) -> _Layer:
    """Sequences that continue from their slots, at the beginning of a piece."""
    cuda, short = torch.device("cuda"), torch.bfloat16
    x = torch.randn(num_seqs * count, CHANNELS, device=cuda, dtype=short)
    weight = torch.randn(CHANNELS, WIDTH, device=cuda, dtype=short)
    g = -torch.rand(num_seqs * count, VALUE_HEADS, device=cuda)
    kept = num_seqs + 1, KEY_HEADS, CHANNELS // KEY_HEADS, WIDTH - 1
    conv = torch.randn(kept, device=cuda, dtype=short)
    cache = StateCache(conv, torch.randn(num_seqs + 1, VALUE_HEADS, SIZE, SIZE, device=cuda))
    index = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
    slots, pieces = index[1:], -(-count // PIECE)
    saves = torch.full((num_seqs * pieces,), -1, dtype=torch.int32, device="cuda") if count > 1 else None
    plan = StatePlan(slots, slots, index * count, slots * 0, saves, index * pieces, count == 1)
    return _Layer(x, weight, g, torch.rand_like(g), cache, plan)
