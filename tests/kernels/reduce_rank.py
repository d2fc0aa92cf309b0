"""One rank of the sums over ranks, in Triton's interpreter: a process with its peers' buffers mapped from files.

Its arguments: rank and folder. It writes `rank-R.pt`: the results of the calls of each of RUNS that it is in, in order.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from pd_kernels.triton_reduce import PeerBuffers, reduce_add_half_norm, reduce_add_norm, reduce_sum
from pd_kernels.values import HalfNormed
from tests.kernels.interpreter import hasten

EPS = 1e-5
RUNS = ((2, 40), (3, 12))  # ranks, calls: of two ranks, every mode occurs in every layout


@dataclass(frozen=True)
class Layout:
    """The buffers of some calls."""

    width: int
    num_blocks: int
    dtype: torch.dtype

    def path(self, folder: Path, num_ranks: int, rank: int) -> Path:
        return folder / f"{self.width}-{num_ranks}-{rank}"

    def num_bytes(self, num_ranks: int) -> int:
        return PeerBuffers.num_bytes(num_ranks, self.num_blocks, self.width, self.dtype)


LAYOUTS = (Layout(7, 4, torch.float32), Layout(96, 5, torch.float16), Layout(2500, 6, torch.float16))


@dataclass(frozen=True)
class Call:
    """One sum. All ranks make the same calls, in the same order."""

    number: int
    mode: str
    layout: Layout
    num_rows: int

    def partial(self, rank: int) -> torch.Tensor:
        return self._random(rank, self.num_rows, self.layout.width)

    def residual(self) -> torch.Tensor:
        return self._random(100, self.num_rows, self.layout.width)

    def weight(self) -> torch.Tensor:
        return self._random(200, self.layout.width)

    def _random(self, seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.number + seed)
        return torch.randn(shape, generator=generator).to(self.layout.dtype)


def calls(count: int) -> list[Call]:
    """All modes and layouts, with any number of rows from none to the most."""
    rng = random.Random(count)
    made = []
    for number in range(count):
        layout = rng.choices(LAYOUTS, (4, 1, 1))[0]
        num_rows = rng.choice((1, 1, rng.randint(0, layout.num_blocks)))
        made.append(Call(number, rng.choice(("sum", "norm", "half")), layout, num_rows))
    return made


def run(call: Call, rank: int, peers: PeerBuffers) -> dict[str, torch.Tensor]:
    partial, residual = call.partial(rank), call.residual()
    if call.mode == "sum":
        return {"sum": reduce_sum(peers, partial)}
    if call.mode == "norm":
        return {"normed": reduce_add_norm(peers, partial, residual, call.weight(), EPS), "sum": residual}
    half = reduce_add_half_norm(peers, partial, residual, call.weight(), EPS)
    assert isinstance(half, HalfNormed)
    return {"x": half.x, "squares": half.squares, "normed": half.normed(), "sum": residual}


def buffers(folder: Path, rank: int, num_ranks: int, layout: Layout) -> PeerBuffers:
    """The buffers of a layout, mapped from their files."""
    size = layout.num_bytes(num_ranks)
    paths = [str(layout.path(folder, num_ranks, peer)) for peer in range(num_ranks)]
    mapped = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
    addresses = torch.tensor([one.data_ptr() for one in mapped])
    turns = torch.zeros(layout.num_blocks, dtype=torch.int32)
    return PeerBuffers(rank, addresses, turns, layout.width, layout.dtype, mapped)


def main() -> None:
    hasten()
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    results = []
    for num_ranks, count in RUNS:
        if rank < num_ranks:
            peers = {layout: buffers(folder, rank, num_ranks, layout) for layout in LAYOUTS}
            results.append([run(call, rank, peers[call.layout]) for call in calls(count)])
    torch.save(results, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    main()
