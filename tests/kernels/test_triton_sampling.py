# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Triton's draw has the reference's bits; argmax takes the first of equals."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="the Triton kernels need triton")

import triton.language as tl  # noqa: E402

from pd_kernels import sampling, triton_sampling  # noqa: E402

# Triton's interpreter on numpy
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # the hash wraps, as it should
]
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SIZES = [(1, 5), (3, 5000), *([(256, 128256)] if GPU else [])]


@triton.jit
def _noise_kernel(seeds, positions, out, SIZE: tl.constexpr):
    row, token = tl.program_id(0), tl.arange(0, SIZE)
    noise = triton_sampling.gumbel_noise(tl.load(seeds + row), tl.load(positions + row), token)
    tl.store(out + row * SIZE + token, noise)


def keys(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (num_rows,), generator=generator)
    return seeds.to(DEVICE), torch.randint(0, 100_000, (num_rows,), generator=generator).to(DEVICE)


def test_noise_is_the_references() -> None:
    """To a few units in the last place of the logarithms; a single wrong bit of the hash would show."""
    seeds, positions = keys(8)
    found = torch.empty((8, 2048), device=DEVICE)
    _noise_kernel[(8,)](seeds, positions, found, 2048)
    tokens = torch.arange(2048, dtype=torch.int32, device=DEVICE)
    bits = sampling.random_bits(seeds, positions, tokens).long() & 0x7FFFFFFF
    uniform = ((bits.float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24).double()
    expected = (-torch.log1p(-uniform)).log()
    assert ((found.double() - expected).abs() < 2e-6 * expected.abs().clamp(min=1)).all()


@pytest.mark.parametrize(("num_rows", "vocab_size"), SIZES)
def test_the_draw_is_the_references(num_rows: int, vocab_size: int) -> None:
    seeds, positions = keys(num_rows)
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn((num_rows, vocab_size), generator=generator).to(DEVICE)
    before = logits.clone()
    found = triton_sampling.gumbel_sample(logits, seeds, positions)
    assert torch.equal(logits, before)
    assert torch.equal(found, sampling.gumbel_sample(logits, seeds, positions))


def test_a_limited_draw_is_the_references() -> None:
    seeds, positions = keys(4)
    logits = torch.randn((4, 700), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    top_k = torch.tensor([1, 5, 700, 700], device=DEVICE)
    top_p, min_p = torch.tensor([1, 1, 0.5, 1.0], device=DEVICE), torch.tensor([0, 0, 0, 0.2], device=DEVICE)
    found = triton_sampling.truncated_sample(logits.clone(), top_k, top_p, min_p, seeds, positions)
    assert torch.equal(found, sampling.truncated_sample(logits, top_k, top_p, min_p, seeds, positions))


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
    drawn = triton_sampling.gumbel_sample(logits, *keys(3)).tolist()
    assert drawn[0] == 0
    assert drawn[1] % 2 == 1
    assert max(drawn) < vocab_size


def test_wrong_shapes_are_refused() -> None:
    logits = torch.zeros((3, 8), device=DEVICE)
    with pytest.raises(ValueError, match="2 seeds"):
        triton_sampling.gumbel_sample(logits, *keys(2))
    with pytest.raises(ValueError, match="unit last stride"):
        triton_sampling.argmax(logits.T)
