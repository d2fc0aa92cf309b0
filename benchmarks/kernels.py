"""Times the GPU kernels on the shapes of an 8B model and compares them with measured limits of the machine.

    python -m benchmarks kernels

Every call is in a CUDA graph that visits several layers of one cache, so that no launch waits for Python and the L2
cache holds only what it would hold in a model. Bytes and FLOPs are the least that the task needs, not those of the
kernel. The limits are measured in the same run: an elementwise operation (bytes read plus written) and a matrix
product. Reading alone can be faster than the first.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.kernel_time import KernelTime, measure_ceilings, seconds_of
from benchmarks.latent_rows import latent_rows
from benchmarks.state_rows import state_rows
from pd_kernels.attention import AttentionShape
from pd_kernels.attention_backends import choose_attention
from pd_kernels.backends import TORCH, Kernels
from pd_kernels.latent import LatentPlan
from pd_kernels.selection import select_kernels
from pd_kernels.values import Draws, HeadNorms, KeysValues, NewTokens, PackedSequences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd_kernels.attention import GroupAttention

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB, BLOCK = 32, 8, 128, 4096, 14336, 128256, 64
DECODES = [[context] * batch for context in (1024, 4096) for batch in (1, 32, 128, 256)]
MIXED_DECODES = [[1024, 2048, 3072, 5120, 8192, 10240, 12288, 15360], [20 + index * index for index in range(64)]]
ROTATING, ROTATING_CONTEXT = (1, 2, 8, 16, 32, 64, 128, 256), 1024
PREFILLS = [  # sequences, their tokens, their tokens in this step
    (1, 1024, 1024), (1, 4096, 4096), (4, 15000, 15000), (1, 8064, 64), (1, 8256, 256), (1, 8512, 512),
]  # fmt: skip
PRODUCTS = {  # outputs, inputs, whether the outputs are gates and ups
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, False),
    "gate_up": (2 * INTERMEDIATE, HIDDEN, True),
    "down": (HIDDEN, INTERMEDIATE, False),
}
CACHE_BYTES = 8 << 30  # of the layers that a measurement visits


@dataclass(frozen=True)
class Attention:
    """An attention problem over several layers of one cache."""

    attention: GroupAttention
    packed: PackedSequences
    query: torch.Tensor
    views: list[KeysValues]


def make_attention(contexts: Sequence[int], query_len: int, num_kv_heads: int = KV_HEADS) -> Attention:
    """Sequences with `contexts` tokens, the last `query_len` of them in this step; their blocks are scattered."""
    num_seqs, per_seq = len(contexts), -(-max(contexts) // BLOCK)
    layer_bytes = num_seqs * per_seq * num_kv_heads * 2 * BLOCK * HEAD_DIM * 2
    num_layers = int(np.clip(CACHE_BYTES // layer_bytes, 2, 32))
    shape = (num_seqs * per_seq, num_kv_heads, num_layers, 2, BLOCK, HEAD_DIM)
    cache = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
    tables = torch.randperm(num_seqs * per_seq, device="cuda").to(torch.int32).view(num_seqs, per_seq)
    lens, query_lens = np.array(contexts), np.full(num_seqs, query_len)
    packed = PackedSequences(
        num_seqs if query_len == 1 else 0,
        torch.arange(num_seqs + 1, device="cuda", dtype=torch.int32) * query_len,
        torch.from_numpy(lens.astype(np.int32)).cuda(),
        tables,
        query_lens,
        lens,
    )
    query = torch.randn(num_seqs * query_len, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    attention_shape = AttentionShape(HEADS, num_kv_heads, HEAD_DIM, BLOCK, num_layers, torch.bfloat16)
    attention = choose_attention(attention_shape, query.device).backend.attention(attention_shape, query.device)
    views = [KeysValues(cache[:, :, layer, 0], cache[:, :, layer, 1]) for layer in range(num_layers)]
    return Attention(attention, packed, query, views)


def decode_bytes(contexts: Sequence[int], num_kv_heads: int = KV_HEADS) -> float:
    return sum(context * num_kv_heads * 2 + 2 * HEADS for context in contexts) * HEAD_DIM * 2.0


def prefill_flops(num_seqs: int, context: int, query_len: int) -> float:
    """Two products per head, of each query with all keys up to its own position."""
    return num_seqs * 2 * query_len * (2 * context - query_len + 1) * HEADS * HEAD_DIM


def attention_rows() -> Iterator[KernelTime]:
    """Time decode and prefill attention."""
    for contexts in (*DECODES, *MIXED_DECODES):
        low, high = min(contexts), max(contexts)
        name = f"decode {len(contexts)} x {low}" if low == high else f"decode {len(contexts)} of {low} to {high}"
        yield KernelTime(name, _attention_seconds(contexts, 1), decode_bytes(contexts), 0.0)
    for num_seqs, context, query_len in PREFILLS:
        name = f"prefill {num_seqs} x {query_len}" + (f" behind {context - query_len}" if context > query_len else "")
        contexts, flops = [context] * num_seqs, prefill_flops(num_seqs, context, query_len)
        yield KernelTime(name, _attention_seconds(contexts, query_len), decode_bytes(contexts), flops)


def _attention_seconds(contexts: Sequence[int], query_len: int) -> float:
    problem = make_attention(contexts, query_len)
    plan = problem.attention.plan(problem.packed)
    assert not isinstance(plan, LatentPlan)
    return seconds_of([partial(plan.run, problem.query, view, HEAD_DIM**-0.5) for view in problem.views])


def rotating_rows(kernels: Kernels) -> Iterator[KernelTime]:
    """Time norms, rotation, write and decode attention, in two launches and in one, whatever a plan would choose."""
    for num_kv_heads, batch in itertools.product((KV_HEADS, KV_HEADS // 2), ROTATING):
        contexts = [ROTATING_CONTEXT] * batch
        problem = make_attention(contexts, 1, num_kv_heads)
        size = decode_bytes(contexts, num_kv_heads)
        for name, run in (("two", _in_two_launches), ("one", _in_one_launch)):
            seconds = seconds_of(run(kernels, problem))
            yield KernelTime(f"rotate + decode {batch}, {num_kv_heads} KV heads, {name}", seconds, size, 0.0)


def _new_tokens(problem: Attention) -> tuple[torch.Tensor, NewTokens]:
    """QKV products of all layers [L, S, H + 2G, D], and what else their new tokens need."""
    layers, batch, num_kv_heads = len(problem.views), len(problem.query), problem.views[0].keys.shape[1]
    shape = (layers, batch, HEADS + 2 * num_kv_heads, HEAD_DIM)
    heads = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(2, batch, HEAD_DIM // 2, device="cuda", dtype=torch.bfloat16)
    gains = torch.ones(2, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    last = ROTATING_CONTEXT - 1
    slots = problem.packed.block_tables[:, last // BLOCK].long() * BLOCK + last % BLOCK
    return heads, NewTokens(HeadNorms(gains[0], gains[1], 1e-6), cos, sin, slots)


def _in_two_launches(kernels: Kernels, problem: Attention) -> list[Callable[[], object]]:
    heads, new = _new_tokens(problem)
    plan = problem.attention.plan(problem.packed)
    assert not isinstance(plan, LatentPlan)

    def run(layer: int) -> torch.Tensor:
        views = problem.views[layer]
        query = kernels.norm_rope_write(heads[layer], new, views)
        return plan.run(query, views, HEAD_DIM**-0.5)

    return [partial(run, layer) for layer in range(len(heads))]


def _in_one_launch(kernels: Kernels, problem: Attention) -> list[Callable[[], object]]:
    from pd_kernels.triton_plan import TritonAttention

    attention = problem.attention
    assert isinstance(attention, TritonAttention)
    always = replace(attention, decode=replace(attention.decode, rotates_from=1))
    heads, new = _new_tokens(problem)
    plan = always.plan(problem.packed)
    return [
        partial(plan.run_rotating, heads[layer], new, views, HEAD_DIM**-0.5)
        for layer, views in enumerate(problem.views)
    ]


def product_rows(kernels: Kernels, num_rows: int) -> Iterator[KernelTime]:
    """Time products of few rows, with different weights in each call."""
    for name, (num_outputs, num_inputs, gated) in PRODUCTS.items():
        x = torch.randn(num_rows, num_inputs, device="cuda", dtype=torch.bfloat16)
        weights = torch.randn(8, num_outputs, num_inputs, device="cuda", dtype=torch.bfloat16)
        products = [kernels.few_rows(weight, None, gated) for weight in weights]
        calls = [partial(product, x) for product in products if product is not None]
        if calls:
            size = 2.0 * num_outputs * num_inputs
            yield KernelTime(f"product {name} {num_rows}", seconds_of(calls), size, size * num_rows)


def elementwise_rows(kernels: Kernels, num_tokens: int) -> Iterator[KernelTime]:
    """Time the kernels between the matrix products, for a step of `num_tokens`."""
    copies = max(min((1 << 31) // (num_tokens * INTERMEDIATE * 4), 32), 2)  # together larger than the L2 cache
    x, residual = torch.randn(2, copies, num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    size = 2.0 * num_tokens
    sums = [partial(kernels.add_rms_norm, x[i], residual[i], weight, 1e-5) for i in range(copies)]
    yield KernelTime(f"add + rms_norm {num_tokens}", seconds_of(sums), 4 * size * HIDDEN, 0)
    gate_up = torch.randn(copies, num_tokens, 2 * INTERMEDIATE, device="cuda", dtype=torch.bfloat16)
    gates = [partial(kernels.silu_and_mul, gate_up[i]) for i in range(copies)]
    yield KernelTime(f"silu_and_mul {num_tokens}", seconds_of(gates), 3 * size * INTERMEDIATE, 0)
    heads = torch.randn(copies, num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(2, num_tokens, HEAD_DIM // 2, device="cuda", dtype=torch.bfloat16)
    norms = HeadNorms(
        torch.ones(HEAD_DIM, device="cuda", dtype=torch.bfloat16),
        torch.ones(HEAD_DIM, device="cuda", dtype=torch.bfloat16),
        1e-6,
    )
    shape = (num_tokens // BLOCK + 1, KV_HEADS, copies, 2, BLOCK, HEAD_DIM)
    cache = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    new = NewTokens(norms, cos, sin, torch.randperm(num_tokens, device="cuda"))
    writes = [
        partial(kernels.norm_rope_write, heads[i], new, KeysValues(cache[:, :, i, 0], cache[:, :, i, 1]))
        for i in range(copies)
    ]
    yield KernelTime(
        f"norm_rope_write {num_tokens}", seconds_of(writes), 2 * size * (HEADS + 2 * KV_HEADS) * HEAD_DIM, 0
    )


def sampling_rows(kernels: Kernels, num_rows: int) -> Iterator[KernelTime]:
    """Time greedy and drawn tokens."""
    copies = max((1 << 28) // (num_rows * VOCAB * 2), 2)
    logits = torch.randn(copies, num_rows, VOCAB, device="cuda", dtype=torch.bfloat16)
    seeds = torch.randint(0, 1 << 62, (num_rows,), device="cuda")
    draws = Draws(torch.full((num_rows,), 0.6, device="cuda"), seeds, seeds, limits=None)
    greedy = [partial(kernels.argmax, logits[i]) for i in range(copies)]
    yield KernelTime(f"argmax {num_rows}", seconds_of(greedy), 2.0 * num_rows * VOCAB, 0)
    drawn = [partial(kernels.draw, logits[i], draws) for i in range(copies)]
    yield KernelTime(f"draw {num_rows}", seconds_of(drawn), 2.0 * num_rows * VOCAB, 0)


def copy_rows(kernels: Kernels) -> Iterator[KernelTime]:
    """Time the copy of eight blocks of an 8B model on the device."""
    blocks = torch.randn(64, 4 << 20, device="cuda", dtype=torch.bfloat16).view(64, KV_HEADS, 32, 2, BLOCK, HEAD_DIM)
    pairs = torch.stack((torch.arange(8), torch.arange(8) + 32), dim=1).cuda()
    target = torch.empty_like(blocks)
    calls = [partial(kernels.copy_blocks, blocks, target, pairs)] * 10
    yield KernelTime("copy_blocks 8 x 8 MiB", seconds_of(calls), 2.0 * 8 * (8 << 20), 0)


def rows(kernels: Kernels) -> Iterator[KernelTime]:
    """All rows of the table."""
    yield from attention_rows()
    yield from rotating_rows(kernels)
    for num_rows in (1, 32):
        yield from product_rows(kernels, num_rows)
    for num_tokens in (1, 32, 256, 4096):
        yield from elementwise_rows(kernels, num_tokens)
    for num_rows in (1, 32, 256):
        yield from sampling_rows(kernels, num_rows)
    yield from copy_rows(kernels)
    yield from state_rows(kernels.state)
    yield from latent_rows()


def main(arguments: Sequence[str] = ()) -> int:
    """Print the table of the GPU's own kernels. Returns 2 when there is no GPU or no Triton."""
    argparse.ArgumentParser(prog="python -m benchmarks kernels").parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("python -m benchmarks kernels: no CUDA device here\n")
        return 2
    kernels = select_kernels(torch.device("cuda"))
    if kernels is TORCH:
        sys.stderr.write("python -m benchmarks kernels: triton is not installed, library calls run instead\n")
        return 2
    ceilings = measure_ceilings()
    sys.stdout.write(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels: {kernels.name}\n"
        f"elementwise {ceilings.bytes_per_s / 1e12:.2f} TB/s, "
        f"matrix product {ceilings.flops_per_s / 1e12:.0f} TFLOP/s\n"
    )
    with torch.inference_mode():
        for row in rows(kernels):
            sys.stdout.write(row.text(ceilings))
            sys.stdout.flush()
    return 0
