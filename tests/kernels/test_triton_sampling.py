# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Triton's draw has the reference's bits; argmax takes the first of equals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton", reason="the Triton kernels need triton")

import triton.language as tl  # noqa: E402

from pd_kernels import sampling, triton_sampling  # noqa: E402
from pd_kernels.values import Draws, Limits  # noqa: E402

# Triton's interpreter on numpy
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # infinities over a temperature
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # the hash wraps, as it should
]
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SIZES = [(1, 5), (3, 5000), *([(256, 128256)] if GPU else [])]


@triton.jit
def _hash_kernel(seeds, positions, out, SIZE: tl.constexpr):
    row, token = tl.program_id(0), tl.arange(0, SIZE)
    low, high = triton_sampling.draw_key(tl.load(seeds + row), tl.load(positions + row))
    tl.store(out + row * SIZE + token, triton_sampling.hash_token(low, high, token))


@triton.jit
def _noise_kernel(bits, out, SIZE: tl.constexpr, FAST: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, triton_sampling.noise_of(tl.load(bits + at), FAST))


def keys(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (num_rows,), generator=generator)
    return seeds.to(DEVICE), torch.randint(0, 100_000, (num_rows,), generator=generator).to(DEVICE)


def test_the_hash_is_the_references() -> None:
    seeds, positions = keys(8)
    found = torch.empty((8, 2048), dtype=torch.int32, device=DEVICE)
    _hash_kernel[(8,)](seeds, positions, found, 2048)
    tokens = torch.arange(2048, dtype=torch.int32, device=DEVICE)
    assert torch.equal(found, sampling.random_bits(seeds, positions, tokens) & 0x7FFFFFFF)


def test_noise_is_exact_to_a_few_units_in_the_last_place() -> None:
    """Of uniform variates of all sizes, from the smallest to the largest."""
    generator = torch.Generator().manual_seed(5)
    spread = (2 ** (31 * torch.rand(1 << 15, generator=generator, dtype=torch.float64))).long() - 1
    quarter = (1 << 29) + torch.arange(-64, 64)  # where the polynomial ends
    ends = torch.cat((torch.arange(64), (1 << 31) - 1 - torch.arange(64)))
    even = torch.randint(0, 1 << 31, ((1 << 15) - 256,), generator=generator)
    bits = torch.cat((spread, even, quarter, ends)).clamp(max=(1 << 31) - 1).int().to(DEVICE)
    found = torch.empty(len(bits), device=DEVICE)
    _noise_kernel[(len(bits) // 4096,)](bits, found, 4096, GPU)
    uniform = ((bits.float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24).double()
    expected = (-torch.log1p(-uniform) / math.log(2)).log2()
    limit = 1.2e-6 if GPU else 6e-7
    assert ((found.double() - expected).abs() < limit * expected.abs().clamp(min=1)).all()


def draws_of(temperatures: list[float], limits: Limits | None = None) -> Draws:
    return Draws(torch.tensor(temperatures, device=DEVICE), *keys(len(temperatures)), limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), SIZES)
def test_the_draw_is_the_references(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    """Whatever the logits' type, with rows of all sorts side by side."""
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn((num_rows, vocab_size), generator=generator)).to(DEVICE, dtype)
    before, draws = logits.clone(), draws_of(([0.6, 0.0, 1.3] * num_rows)[:num_rows])
    found = triton_sampling.draw(logits, draws)
    assert torch.equal(logits, before)
    assert torch.equal(found, sampling.draw(logits, draws))
    assert torch.equal(found, triton_sampling.draw(logits.float(), draws))


def test_a_limited_draw_is_the_references() -> None:
    logits = torch.randn((9, 700), generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.float16)
    limits = Limits(
        top_k=torch.tensor([700, 1, 5, 700, 700, 700, 700, 700, 700], device=DEVICE),
        top_p=torch.tensor([1, 1, 1, 1, 0.5, 1, 1, 1, 1], dtype=torch.float32, device=DEVICE),
        min_p=torch.tensor([0, 0, 0, 0, 0, 0, 0, 0.2, 1.0], device=DEVICE),
    )
    draws = draws_of([0.7, 0.3, 0.9, 0.0, 1.7, 1.0, 0.0, 1.1, 0.6], limits)
    found = triton_sampling.draw(logits, draws)
    assert torch.equal(found, sampling.draw(logits, draws))
    best = logits.argmax(-1)
    assert torch.equal(found[[1, 3, 6, 8]], best[[1, 3, 6, 8]])  # the best of one, no draw, only those as good
    assert not torch.equal(found, triton_sampling.draw(logits, replace(draws, limits=None)))


@pytest.mark.parametrize(("num_rows", "vocab_size"), SIZES)
def test_argmax_takes_the_first_of_equals(num_rows: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(0, 9, (num_rows, vocab_size), generator=generator).float().to(DEVICE)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert triton_sampling.argmax(logits).tolist() == expected
    assert triton_sampling.argmax(torch.full((2, vocab_size), -torch.inf, device=DEVICE)).tolist() == [0, 0]


@pytest.mark.parametrize("vocab_size", [5, 5000])
def test_nan_is_never_chosen_and_never_leads_out_of_the_vocabulary(vocab_size: int) -> None:
    """An id past the vocabulary would make the next step read past the embedding: the end of a whole node."""
    logits = torch.zeros((3, vocab_size), device=DEVICE)
    logits[0], logits[1, ::2], logits[1, 3] = torch.nan, torch.nan, 1.0
    assert triton_sampling.argmax(logits).tolist() == [0, 3, 0]
    drawn = triton_sampling.draw(logits, draws_of([1.0] * 3)).tolist()
    assert drawn[0] == 0
    assert drawn[1] % 2 == 1
    assert max(drawn) < vocab_size


def test_wrong_shapes_are_refused() -> None:
    logits = torch.zeros((3, 8), device=DEVICE)
    with pytest.raises(ValueError, match="2 rows of draws"):
        triton_sampling.draw(logits, draws_of([1.0, 1.0]))
    with pytest.raises(ValueError, match="unit last stride"):
        triton_sampling.argmax(logits.T)
