"""Measured limits of a GPU, and the bytes and floating-point operations that a model's work needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pd_cluster.models.quantization import BYTES_OF_FORM
from pd_cluster.models.spec import STATE_DISTANCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.models.spec import ModelSpec

BUFFER_BYTES = 4 << 30  # many times the L2
MATRIX_SIZE = 8192
_REPEATS = 10
_BYTES = 2  # of a number in bf16


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of one device, in bytes/s and FLOP/s."""

    read: float  # of memory, by a sum
    copy: float  # of memory, read and written
    matrix: float  # a bf16 product of random matrices
    quantized: float = 0.0  # the same in fp8, with a scale for each row; 0: not measured

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
    quantized_s = _quantized_seconds(left, right)
    flops = 2 * MATRIX_SIZE**3
    return Ceilings(BUFFER_BYTES / read_s, 2 * BUFFER_BYTES / copy_s, flops / matrix_s, flops / quantized_s)


def _quantized_seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    fp8 = torch.float8_e4m3fn
    rows, columns = left.to(fp8), right.t().contiguous().to(fp8).t()
    ones = torch.ones(MATRIX_SIZE, device=left.device)
    return _seconds(
        lambda: torch._scaled_mm(
            rows, columns, scale_a=ones[:, None], scale_b=ones[None], out_dtype=torch.bfloat16, use_fast_accum=True
        )
    )


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
    """Costs of a decoder. The weights of its head have 2 bytes."""

    spec: ModelSpec
    weight_bytes: int = 2  # of a weight of the layers, but for packed experts; 1: products with them are in fp8
    kv_itemsize: int = 2  # bytes per number of the cache

    @property
    def head_parameters(self) -> int:
        return self.spec.vocab_size * self.spec.hidden_size

    @property
    def kv_token_bytes(self) -> int:
        if (latent := self.spec.latent) is not None:
            return self.spec.num_layers * latent.width * self.kv_itemsize
        return 2 * self.spec.num_layers * self.spec.num_kv_heads * self.spec.head_dim * self.kv_itemsize

    def experts_hit(self, num_tokens: int) -> float:
        """Experts of a layer that so many tokens choose, if each token's choice is even and independent; 0 if dense."""
        experts = self.spec.experts
        if experts is None:
            return 0.0
        return experts.num_experts * (1 - (1 - experts.num_chosen / experts.num_experts) ** num_tokens)

    def decode_s(self, num_sequences: int, context: float, ceilings: Ceilings) -> float:
        """Least seconds of a step: reading its weights and its KV once, or the products if they take longer.

        States are read and written.
        """
        num_bytes = self._layer_bytes(self.experts_hit(num_sequences))
        num_bytes += self.head_parameters * _BYTES + num_sequences * (self._kv_bytes(context) + self._state_bytes)
        return max(num_bytes / ceilings.memory, self._products_s(num_sequences, num_sequences, ceilings))

    def prefill_s(self, lengths: Sequence[int], ceilings: Ceilings) -> float:
        """Least seconds for prompts: products of all tokens, the head for each last token, causal attention, states.

        Of the delta rule the products of its pieces of 64 tokens count, in bf16, but not the inverse of a piece.
        """
        s = self.spec
        keys = sum(self._keys_seen(length) for length in lengths)
        value_dim = s.head_dim if s.latent is None else s.latent.value
        attention = 2 * s.num_heads * (s.head_dim + value_dim) * keys
        if (state := s.state) is not None:
            piece = 4 * STATE_DISTANCE * state.key_dim + 3 * state.key_dim * state.value_dim
            attention += 2 * len(state.layers) * state.value_heads * piece * sum(lengths)
        return self._products_s(sum(lengths), len(lengths), ceilings) + attention / ceilings.matrix

    def _kv_bytes(self, context: float) -> float:
        """Bytes that a decode reads of its cache: of a layer with a window no more than the window."""
        tokens = sum(min(context, window) if window else context for window in self._windows)
        return tokens * self.kv_token_bytes / self.spec.num_layers

    @property
    def _state_bytes(self) -> float:
        """Bytes of a sequence's states that a step moves: it reads them and writes them."""
        state = self.spec.state
        return 0.0 if state is None else 2 * state.value_heads * state.head_floats(_BYTES) * 4.0

    @property
    def _windows(self) -> list[int]:
        return [self.spec.windows[layer] for layer in self.spec.attention_layers]

    def _keys_seen(self, length: int) -> float:
        """Pairs of token and earlier token, in all layers."""
        sizes = (min(length, window) if window else length for window in self._windows)
        return sum(length * size - size * size / 2 for size in sizes)

    def _layer_bytes(self, num_experts: float) -> float:
        """Of the weights that a step reads with `num_experts` of each mixture."""
        read, experts = self._layer_parameters(num_experts), self.spec.experts
        if experts is None or not experts.form:
            return read * self.weight_bytes
        others = self._layer_parameters(0)
        return others * self.weight_bytes + (read - others) * BYTES_OF_FORM[experts.form]

    def _products_s(self, num_tokens: int, num_samples: int, ceilings: Ceilings) -> float:
        multiplied = self._layer_parameters(self.spec.experts.num_chosen if self.spec.experts else 0)
        rate = ceilings.matrix if self.weight_bytes == _BYTES else ceilings.quantized
        return 2 * (multiplied * num_tokens / rate + self.head_parameters * num_samples / ceilings.matrix)

    def _layer_parameters(self, num_experts: float) -> float:
        """Weights in the products of all layers, with `num_experts` of each mixture."""
        experts = self.spec.experts
        if experts is None:
            return self.spec.layer_parameters
        none, one = (
            replace(self.spec, experts=replace(experts, num_experts=count)).layer_parameters for count in (0, 1)
        )
        return none + num_experts * (one - none)
