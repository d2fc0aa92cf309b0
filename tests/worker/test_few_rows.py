"""Steps of few tokens with products that include the norms between them, beside the same steps without those."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from benchmarks.shapes import CONFIGS
from pd_cluster.models.forward_inputs import ForwardInputs, Tail
from pd_cluster.models.registry import build_model, resolve_spec
from pd_cluster.models.spec import ExpertsSpec
from pd_cluster.models.weights import fill_at_random
from pd_kernels import reference
from pd_kernels.attention import AttentionShape
from pd_kernels.attention_backends import choose_attention
from pd_kernels.backends import TORCH, Kernels, no_few_rows
from pd_kernels.latent import LatentPlan
from pd_kernels.selection import select_kernels
from pd_kernels.values import HalfNormed, KeysValues, PackedSequences

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.models.model import Model
    from pd_kernels.attention import AttentionPlan
    from pd_kernels.gemm_selection import Product
    from pd_kernels.quantized import Weight

MAX_ROWS, BLOCK = 4, 16


@dataclass(frozen=True)
class PlainFewRows:
    """backends.FewRows in plain torch."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    gated: bool
    max_rows: int = MAX_ROWS

    def __call__(self, x: torch.Tensor | HalfNormed) -> torch.Tensor:
        if isinstance(x, HalfNormed):
            x = x.x / torch.sqrt(x.squares.sum(0) / x.x.shape[1] + x.eps)[:, None]
        return reference.linear(x, self.weight, self.bias, self.gated)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, eps: float) -> HalfNormed:
        residual += reference.linear(x, self.weight, self.bias, False)
        return HalfNormed(residual * norm, residual.pow(2).sum(-1)[None], eps)


MIXTURE = ExpertsSpec(num_experts=8, num_chosen=2, size=48, normalized=True)
SHARED = replace(MIXTURE, shared_size=40, dense_layers=(0,))


def plain_few_rows(weight: Weight, bias: torch.Tensor | None, gated: bool) -> PlainFewRows | None:
    """See backends.MakeFewRows. None for quantized weights."""
    return PlainFewRows(weight, bias, gated) if isinstance(weight, torch.Tensor) else None


FEW_ROWS = replace(TORCH, few_rows=plain_few_rows)
NOT_FOR_THE_HEAD = replace(
    TORCH, few_rows=lambda weight, bias, gated: None if len(weight) == 2048 else plain_few_rows(weight, bias, gated)
)


def make_model(
    kernels: Kernels,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    hidden_size: int = 64,
    experts: ExpertsSpec | None = None,
) -> Model:
    spec = resolve_spec(Path(), CONFIGS["tiny"])
    spec = replace(spec, qkv_bias=bias, hidden_size=hidden_size, intermediate_size=2 * hidden_size)
    spec = replace(spec, experts=experts)
    model = build_model(spec, kernels, 128, dtype, torch.device(device))
    fill_at_random(model, seed=1)
    model.finish_loading()
    return model


@torch.inference_mode()
def decode(model: Model, count: int, sampling: list[int] | None) -> torch.Tensor:
    """Logits of a step of `count` sequences, the i-th at its (i + 3)-th token, over a cache of noise."""
    return prepare(model, count, sampling)()


def prepare(model: Model, count: int, sampling: list[int] | None) -> Callable[[], torch.Tensor]:
    spec, lengths, device = model.spec, np.arange(count) % (BLOCK - 3) + 3, model.device
    shape = (count, spec.num_kv_heads, spec.num_layers, 2, BLOCK, spec.head_dim)
    cache = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device, model.dtype)
    caches = {layer: KeysValues(cache[:, :, layer, 0], cache[:, :, layer, 1]) for layer in range(spec.num_layers)}
    attention_shape = AttentionShape(
        spec.num_heads, spec.num_kv_heads, spec.head_dim, BLOCK, spec.num_layers, model.dtype
    )
    attention = choose_attention(attention_shape, device).backend.attention(attention_shape, device)
    blocks = torch.arange(count, dtype=torch.int32, device=device)

    def plan(rows: list[int]) -> AttentionPlan:
        packed = PackedSequences(
            num_decodes=len(rows),
            query_starts=torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
            seq_lens=torch.from_numpy(lengths[rows].astype(np.int32)).to(device),
            block_tables=blocks[rows, None],
            host_query_lens=np.ones(len(rows), np.int64),
            host_seq_lens=lengths[rows],
        )
        plan = attention.plan(packed)
        assert not isinstance(plan, LatentPlan)
        return plan

    tail = None
    if sampling is not None:
        tail = Tail(torch.tensor(sampling, dtype=torch.int64, device=device), plan(sampling))
    positions = torch.from_numpy(lengths).to(device) - 1
    inputs = ForwardInputs(
        token_ids=torch.arange(count, device=device) + 7,
        positions=positions,
        slot_mappings=[blocks * BLOCK + positions],
        plans=[plan(list(range(count)))],
        tail=tail,
    )
    return partial(model.forward, inputs, caches)


@pytest.mark.parametrize("rows", [None, [2, 0], []], ids=["all", "some", "none"])
@pytest.mark.parametrize("count", [3, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize("experts", [None, MIXTURE, SHARED], ids=["dense", "experts", "shared"])
def test_logits_are_the_same(experts: ExpertsSpec | None, count: int, rows: list[int] | None) -> None:
    usual, few = (decode(make_model(kernels, experts=experts), count, rows) for kernels in (TORCH, FEW_ROWS))
    assert usual.shape == few.shape == (count if rows is None else len(rows), 2048)
    torch.testing.assert_close(few, usual, rtol=1e-4, atol=1e-5)


def test_all_products_or_none_are_of_few_rows() -> None:
    usual, partly = (decode(make_model(kernels), 2, None) for kernels in (TORCH, NOT_FOR_THE_HEAD))
    assert torch.equal(usual, partly)


@pytest.mark.parametrize(("kernels", "least"), [(TORCH, 2), (FEW_ROWS, 8)], ids=["usual", "few-rows"])
def test_products_are_chosen_for_steps_of_more_rows_only(kernels: Kernels, least: int) -> None:
    asked: set[tuple[int, int]] = set()

    def propose(num_rows: int, weight: torch.Tensor, parts: int = 1) -> list[Product]:
        asked.add((num_rows, len(weight)))
        return []

    model = make_model(kernels, bias=False, dtype=torch.float64)  # which no CPU packs
    assert model.choose_products([2, 8], [2, 8, 30], propose, lambda run: 1.0) == 0
    assert {size for size, _ in asked} == {size for size in (2, 8, 30) if size >= least}
    assert {size for size, num_outputs in asked if num_outputs == model.spec.vocab_size} == {
        size for size in (2, 8) if size >= least
    }, "of prompts, few rows need logits"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("hidden_size", "experts"), [(64, None), (1024, None), (64, MIXTURE), (1024, SHARED)])
@pytest.mark.parametrize("count", [1, 16, 20, 33, 50, 64])
def test_logits_are_the_same_on_a_gpu(count: int, hidden_size: int, experts: ExpertsSpec | None) -> None:
    """To bfloat16's rounding; and bit by bit each time, whichever kernel is launched how early."""
    if experts is not None:
        experts = replace(experts, num_chosen=experts.num_experts)  # so that rounding changes no choice
    triton = select_kernels(torch.device("cuda"))
    usual, few = (
        make_model(kernels, dtype=torch.bfloat16, device="cuda", hidden_size=hidden_size, experts=experts)
        for kernels in (replace(triton, few_rows=no_few_rows), triton)
    )
    expected, found = decode(usual, count, None).double(), decode(few, count, None)
    assert (found.double() - expected).norm() < 3e-2 * expected.norm()
    for _ in range(20):
        assert torch.equal(decode(few, count, None), found)
    graph, step = torch.cuda.CUDAGraph(), prepare(few, count, None)
    with torch.inference_mode(), torch.cuda.graph(graph):
        replayed = step()
    for _ in range(20):  # back to back, as in decode graphs: what is launched early does overlap then
        graph.replay()
        assert torch.equal(replayed, found)
