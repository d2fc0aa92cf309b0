"""A vocabulary in slices: the best of the slices' bests is the token of the whole row, for every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import sampling, triton_sampling  # noqa: E402
from pd_kernels.values import Draws, Limits, TokenMasks  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    Best = Callable[[torch.Tensor, Draws | None, int], tuple[torch.Tensor, torch.Tensor]]
    Whole = Callable[[torch.Tensor, Draws | None], torch.Tensor]

# Triton's interpreter on numpy
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # the hash wraps, as it should
]
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BACKENDS = ("torch", "triton")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
# Each number of slices and each type; of the interpreter's 2 s a pair, the others are for before a release
PAIRS = [
    pytest.param(num_slices, dtype, marks=[] if GPU or (at + index) % 2 == 0 else [pytest.mark.slow])
    for at, num_slices in enumerate((1, 2, 3, 5))
    for index, dtype in enumerate(DTYPES)
]
LOGITS = st.sampled_from([-torch.inf, -1.0, 0.0, 2.5])


def functions(backend: str) -> tuple[Best, Whole]:
    """The backend's `best`, and its choice from whole rows."""
    argmax, draw, best = (
        (sampling.argmax, sampling.draw, sampling.best)
        if backend == "torch"
        else (triton_sampling.argmax, triton_sampling.draw, triton_sampling.best)
    )
    return best, lambda logits, draws: argmax(logits) if draws is None else draw(logits, draws)


def best_of_slices(best: Best, logits: torch.Tensor, draws: Draws | None, num_slices: int) -> list[int]:
    """As the ranks do it: equal slices, the last ones padded with -inf; of equal scores the lowest id wins."""
    num_rows, vocab_size = logits.shape
    width = -(-vocab_size // num_slices)
    padded = logits.new_full((num_rows, width * num_slices), -torch.inf)
    padded[:, :vocab_size] = logits
    found = [best(padded[:, start : start + width], draws, start) for start in range(0, width * num_slices, width)]
    assert all(scores.dtype == torch.float32 and ids.dtype == torch.int64 for scores, ids in found)
    rows = zip(*(zip(scores.tolist(), ids.tolist(), strict=True) for scores, ids in found), strict=True)
    return [max(row, key=lambda one: (one[0], -one[1]))[1] for row in rows]


def draws_of(num_rows: int, temperatures: list[float]) -> Draws:
    generator = torch.Generator().manual_seed(num_rows)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (num_rows,), generator=generator)
    positions = torch.randint(0, 100_000, (num_rows,), generator=generator)
    repeated = torch.tensor((temperatures * num_rows)[:num_rows], device=DEVICE)
    return Draws(repeated, seeds.to(DEVICE), positions.to(DEVICE))


@pytest.mark.slow_cases
@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_slices", "dtype"), PAIRS, ids=str)
def test_slices_choose_what_the_whole_row_chooses(num_slices: int, dtype: torch.dtype, backend: str) -> None:
    """Greedy rows and rows of all temperatures side by side; a vocabulary that no number of slices divides."""
    best, whole = functions(backend)
    logits = torch.randn((5, 9001), generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
    for draws in (None, draws_of(5, [0.6, 0.0, 1.3, 8.0])):
        before = logits.clone()
        assert best_of_slices(best, logits, draws, num_slices) == whole(logits, draws).tolist()
        assert torch.equal(logits, before)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@given(
    rows=st.lists(st.lists(LOGITS, min_size=11, max_size=11), min_size=1, max_size=4),
    num_slices=st.integers(1, 13),
    temperature=st.sampled_from([None, 0.0, 0.3, 1.0]),
)
@settings(max_examples=8, deadline=None)
def test_ties_go_to_the_lowest_id(
    backend: str, rows: list[list[float]], num_slices: int, temperature: float | None
) -> None:
    """Also where slices are all padding, and where rows have no finite logit."""
    best, whole = functions(backend)
    logits = torch.tensor(rows, device=DEVICE)
    draws = None if temperature is None else draws_of(len(rows), [temperature])
    assert best_of_slices(best, logits, draws, num_slices) == whole(logits, draws).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slice_of_nan_loses_and_no_id_leaves_the_vocabulary(backend: str) -> None:
    best, _ = functions(backend)
    logits = torch.full((2, 12), torch.nan, device=DEVICE)
    logits[1, 6:] = torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, 0.0])
    for draws in (None, draws_of(2, [0.1])):
        assert best_of_slices(best, logits, draws, 2) == [0, 8]


@pytest.mark.parametrize("backend", BACKENDS)
def test_limits_and_masks_are_refused(backend: str) -> None:
    best, _ = functions(backend)
    draws = draws_of(1, [1.0])
    ones = torch.ones(1, device=DEVICE)
    masks = TokenMasks(torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int64))
    for limits, mask in ((Limits(ones.long(), ones, ones), None), (None, masks)):
        with pytest.raises(ValueError, match="whole row"):
            best(
                torch.zeros(1, 8, device=DEVICE),
                Draws(draws.temperature, draws.seeds, draws.positions, limits, mask),
                0,
            )
