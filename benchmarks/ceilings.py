"""Measured limits of a GPU, and the bytes and floating-point operations that a model's work needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.models.spec import ModelSpec

BUFFER_BYTES = 4 << 30  # many times the L2
MATRIX_SIZE = 8192
_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of one device, in bytes/s and FLOP/s."""

    read: float  # of memory, by a sum
    copy: float  # of memory, read and written
    matrix: float  # a bf16 product of random matrices

    @property
    def memory(self) -> float:
        return max(self.read, self.copy)


def measure_ceilings() -> Ceilings:
    """Takes about a second and twice BUFFER_BYTES; `torch.cuda.empty_cache` frees that memory."""
    source = torch.ones(BUFFER_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    read_s = _seconds(source.sum)
    copy_s = _seconds(lambda: target.copy_(source))
    left = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device="cuda", dtype=torch.bfloat16)
    matrix_s = _seconds(lambda: left @ right)
    return Ceilings(BUFFER_BYTES / read_s, 2 * BUFFER_BYTES / copy_s, 2 * MATRIX_SIZE**3 / matrix_s)


def _seconds(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(_REPEATS):
        work()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms / 1e3 / _REPEATS


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Costs of a dense decoder with weights of 2 bytes per number."""

    spec: ModelSpec
    itemsize: int = 2
    kv_itemsize: int = 2  # bytes per number of the cache

    @property
    def head_parameters(self) -> int:
        return self.spec.vocab_size * self.spec.hidden_size

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.spec.num_layers * self.spec.num_kv_heads * self.spec.head_dim * self.kv_itemsize

    def decode_s(self, num_sequences: int, context: float, ceilings: Ceilings) -> float:
        """Least seconds of a step: reading all weights and KV once, or the products if they take longer."""
        parameters = self.spec.layer_parameters + self.head_parameters
        num_bytes = parameters * self.itemsize + num_sequences * context * self.kv_token_bytes
        return max(num_bytes / ceilings.memory, 2 * parameters * num_sequences / ceilings.matrix)

    def prefill_s(self, lengths: Sequence[int], ceilings: Ceilings) -> float:
        """Least seconds for prompts: products of all tokens, the head for each last token, causal attention."""
        s = self.spec
        products = 2 * (s.layer_parameters * sum(lengths) + self.head_parameters * len(lengths))
        attention = sum(2 * s.num_layers * s.num_heads * s.head_dim * length * length for length in lengths)
        return (products + attention) / ceilings.matrix
