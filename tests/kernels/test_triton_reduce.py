"""Sums over ranks beside the oracle in rank order, on ranks that are processes with shared memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels import reference
from pd_kernels.triton_reduce import PeerBuffers, reduce_add_norm, reduce_sum
from tests.kernels.forked_module import start_module
from tests.kernels.reduce_rank import EPS, LAYOUTS, RUNS, Call, calls

if TYPE_CHECKING:
    Results = list[dict[str, torch.Tensor]]

RANKS_S = 200.0
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3}  # per unit of size


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Results]]:
    """The results of each rank. A rank that waits for a flag that never comes fails the tests."""
    folder = tmp_path_factory.mktemp("ranks")
    most_ranks = max(num_ranks for num_ranks, _ in RUNS)
    for layout, (num_ranks, _) in itertools.product(LAYOUTS, RUNS):
        for rank in range(num_ranks):
            layout.path(folder, num_ranks, rank).write_bytes(bytes(layout.num_bytes(num_ranks)))
    ranks = [
        start_module("tests.kernels.reduce_rank", folder / f"of-{rank}", str(rank), str(folder), interprets=True)
        for rank in range(most_ranks)
    ]
    try:
        for started in ranks:
            started.wait(RANKS_S)
    finally:
        for started in ranks:
            started.process.kill()
            started.process.join()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(most_ranks)]


def oracle(call: Call, num_ranks: int) -> dict[str, torch.Tensor]:
    """Added in float32 in the order of ranks, rounded, then added to the residual."""
    total = torch.zeros(call.num_rows, call.layout.width)
    for rank in range(num_ranks):
        total += call.partial(rank).float()
    total = total.to(call.layout.dtype)
    if call.mode == "sum":
        return {"sum": total}
    normed, added = reference.add_rms_norm(total, call.residual(), call.weight(), EPS)
    if call.mode == "norm":
        return {"normed": normed, "sum": added}
    x = (added.float() * call.weight().float()).to(call.layout.dtype)
    return {"x": x, "normed": normed, "sum": added}


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("index", range(len(RUNS)), ids=lambda index: f"{RUNS[index][0]} ranks")
def test_every_rank_has_the_bits_of_the_sum_in_rank_order(index: int, found: list[list[Results]]) -> None:
    """Calls of all modes, numbers of rows and widths, without a pause: the faster rank is ahead of the others."""
    num_ranks, count = RUNS[index]
    results = [of_rank[index - len(RUNS)] for of_rank in found[:num_ranks]]
    for call, *of_ranks in zip(calls(count), *results, strict=True):
        expected = oracle(call, num_ranks)
        for other in of_ranks[1:]:
            assert all(torch.equal(other[name], value) for name, value in of_ranks[0].items()), call
        for name in expected.keys() - {"normed"}:
            assert torch.equal(of_ranks[0][name], expected[name]), (call, name)
        if "normed" in expected and call.num_rows:
            difference = (of_ranks[0]["normed"].double() - expected["normed"].double()).abs()
            limit = TOLERANCE[call.layout.dtype] * expected["normed"].double().abs().clamp(min=1)
            assert (difference <= limit).all(), call


def peers_of_one(width: int = 8, num_blocks: int = 4) -> PeerBuffers:
    """Buffers of a rank without peers."""
    addresses, turns = torch.zeros(1, dtype=torch.int64), torch.zeros(num_blocks, dtype=torch.int32)
    return PeerBuffers(0, addresses, turns, width, torch.float32)


def test_what_does_not_fit_is_refused_before_a_peer_waits_for_it() -> None:
    peers, residual = peers_of_one(), torch.zeros(2, 8)
    for partial in (torch.zeros(5, 8), torch.zeros(2, 9), torch.zeros(2, 8).half(), torch.zeros(8, 2).T):
        assert not peers.takes(partial)
        with pytest.raises(ValueError, match="does not fit the buffers"):
            reduce_sum(peers, partial)
    with pytest.raises(ValueError, match="residual"):
        reduce_add_norm(peers, torch.zeros(2, 8), residual.half(), torch.ones(8), EPS)
    with pytest.raises(ValueError, match="does not fit"):
        reduce_add_norm(peers, torch.zeros(2, 8), residual[:1], torch.ones(8), EPS)
    assert peers.turns.tolist() == [0, 0, 0, 0]


def test_a_buffer_holds_two_turns_of_all_ranks() -> None:
    assert PeerBuffers.num_bytes(2, 3, 4096, torch.bfloat16) == 3 * (32 + 2 * 2 * 8192)
    assert PeerBuffers.num_bytes(2, 3, 4097, torch.bfloat16) == 3 * (32 + 2 * 2 * 8208)
