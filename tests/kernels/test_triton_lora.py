"""What Triton's kernels add for adapters, beside torch's: odd shapes, ranks below a slot's, rows of the base."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import lora, triton_lora
from pd_kernels.lora import NO_TILE, AdapterMatrices, AdapterRows, cut_tiles, most_tiles, tile_rows
from pd_kernels.torch_ops import silu_and_mul
from pd_kernels.values import HalfNormed

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
SHAPES = {  # inputs, outputs of each part
    "qkv": (200, (96, 40, 40)), "gate_up": (96, (136, 136)), "out": (256, (72,)),
}  # fmt: skip
REAL = {"8b qkv": (4096, (4096, 1024, 1024)), "8b down": (14336, (4096,))} if GPU else {}


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 300 rows have the tiles of large steps."""
    for module in (lora, triton_lora):
        monkeypatch.setattr(module, "FEW", 256)


def matrices(inputs: int, parts: tuple[int, ...], ranks: list[int], most: int) -> AdapterMatrices:
    """Random ones of the last two of three products."""
    bounds, generator = tuple(accumulate(parts, initial=0)), torch.Generator().manual_seed(1)
    size = len(parts) * inputs + bounds[-1]
    memory = torch.randn(len(ranks), 48 * most + size * most, generator=generator) / inputs**0.5
    numbers = torch.tensor(ranks, dtype=torch.int32, device=DEVICE)
    return AdapterMatrices(memory.to(DEVICE, DTYPE), numbers, most, 48, inputs, bounds)


def rows_of(slots: list[int], num_slots: int) -> AdapterRows:
    """With tiles that no row has, as captured steps have them."""
    order, tiles = cut_tiles(np.array(slots), len(slots))
    padded = np.full((most_tiles(len(slots), num_slots), 3), NO_TILE)
    padded[: len(tiles)] = tiles
    places, kept = (torch.from_numpy(one.astype(np.int32)).to(DEVICE) for one in (order, padded))
    return AdapterRows(places, kept, tile_rows(len(slots)))


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", [*SHAPES, *REAL])
@pytest.mark.parametrize(
    ("most", "ranks", "num_rows"),  # together: tiles of rows meet tiles of ranks
    [
        (most, ranks, num_rows)
        for most, ranks in ((16, [16, 16, 16]), (64, [16, 64, 32]), (48, [48, 16, 32]))
        for num_rows in (1, 21, 300)
    ],
)
def test_each_row_gets_its_own_adapter(name: str, most: int, ranks: list[int], num_rows: int) -> None:
    inputs, parts = (SHAPES | REAL)[name]
    own, generator = matrices(inputs, parts, ranks, most), torch.Generator().manual_seed(num_rows)
    slots = torch.randint(-1, 3, (num_rows,), generator=generator).tolist() if num_rows > 1 else [1]
    x = torch.randn(num_rows, inputs, generator=generator).to(DEVICE, DTYPE)
    y = torch.randn(num_rows, sum(parts), generator=generator).to(DEVICE, DTYPE)
    found, expected, rows = y.clone(), y.float().clone(), rows_of(slots, 3)
    triton_lora.expand(triton_lora.shrink(x, own, rows), found, own, rows)
    wide = AdapterMatrices(own.memory.float(), own.ranks, most, own.start, inputs, own.bounds)
    lora.expand(lora.shrink(x.float(), wide, rows), expected, wide, rows)
    base = torch.tensor(slots) < 0
    assert torch.equal(found[base], y[base])
    rounding = 2**-8 * expected.norm() if GPU else 0.0  # an element of the sum is rounded to 8 bits
    assert (found.float() - expected).norm() <= (1e-2 if GPU else 1e-5) * (expected - y.float()).norm() + rounding
    assert not torch.equal(found, y)


@pytest.mark.parametrize("num_rows", [1, 21, 300])
@pytest.mark.parametrize(("most", "ranks"), [(16, [16, 16, 16]), (64, [16, 64, 32])])
def test_gates_are_applied_to_all_rows(most: int, ranks: list[int], num_rows: int) -> None:
    """To those of the base, too; and no tile has a row that is not there."""
    inputs, parts = SHAPES["gate_up"]
    own, generator = matrices(inputs, parts, ranks, most), torch.Generator().manual_seed(num_rows)
    slots = torch.randint(-1, 3, (num_rows,), generator=generator).tolist()
    x = torch.randn(num_rows, inputs, generator=generator).to(DEVICE, DTYPE)
    y = torch.randn(num_rows, sum(parts), generator=generator).to(DEVICE, DTYPE)
    rows, sums = rows_of(slots, 3), y.clone()
    low = triton_lora.shrink(x, own, rows)
    found = triton_lora.expand(low, y, own, rows, True)
    triton_lora.expand(low, sums, own, rows)
    assert torch.allclose(found, silu_and_mul(sums), rtol=2**-7 if GPU else 1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_rows", "most", "length"), [(40, 16, 200), (40, 64, 200), (40, 64, 1100), (3, 16, 4200)])
def test_rows_that_few_programs_share(num_rows: int, most: int, length: int) -> None:
    """Of steps in which shrinks run beside products, and of several spans of the inputs."""
    parts = SHAPES["qkv"][1]
    own, generator = matrices(length, parts, [16, most, 16], most), torch.Generator().manual_seed(2)
    slots = torch.randint(-1, 3, (num_rows,), generator=generator).tolist()
    x = torch.randn(num_rows, length, generator=generator).to(DEVICE, DTYPE)
    found, expected, rows = *torch.zeros(2, num_rows, sum(parts), dtype=DTYPE, device=DEVICE), rows_of(slots, 3)
    triton_lora.expand(triton_lora.shrink(x, own, rows), found, own, rows)
    lora.expand(lora.shrink(x, own, rows), expected, own, rows)
    assert (found - expected).float().norm() <= (2e-2 if GPU else 1e-5) * expected.float().norm()


def test_a_row_does_not_depend_on_its_place_and_on_others() -> None:
    inputs, parts = SHAPES["qkv"]
    own, generator = matrices(inputs, parts, [16, 64, 32], 64), torch.Generator().manual_seed(3)
    x = torch.randn(21, inputs, generator=generator).to(DEVICE, DTYPE)
    found = []
    for slots, place in (([1] * 21, 0), ([0, 2, 1] * 7, 2), ([-1] * 20 + [1], 20), ([2] * 20 + [1], 20)):
        moved, y = x.clone(), torch.zeros(21, sum(parts), dtype=DTYPE, device=DEVICE)
        moved[place] = x[0]
        rows = rows_of(slots, 3)
        triton_lora.expand(triton_lora.shrink(moved, own, rows), y, own, rows)
        found.append(y[place])
    assert all(torch.equal(found[0], one) for one in found[1:])


def test_the_division_of_a_norm_comes_after_the_shrink() -> None:
    inputs, parts = SHAPES["qkv"]
    own, generator = matrices(inputs, parts, [16, 64, 32], 64), torch.Generator().manual_seed(4)
    x = torch.randn(5, inputs, generator=generator).to(DEVICE, DTYPE)
    squares = x.float().pow(2).view(5, 4, -1).sum(2).T.contiguous()
    half, rows = HalfNormed(x, squares, 1e-5), rows_of([2, -1, 0, 1, 2], 3)
    found, expected = torch.zeros(2, 5, sum(parts), dtype=DTYPE, device=DEVICE)
    triton_lora.expand(triton_lora.shrink(half, own, rows), found, own, rows)
    triton_lora.expand(triton_lora.shrink(half.normed(), own, rows), expected, own, rows)
    assert (found - expected).float().norm() <= (1e-2 if GPU else 1e-5) * expected.float().norm()
    assert expected.float().norm() > 0
