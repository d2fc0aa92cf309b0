"""Fused SwiGLU: its results on a Hopper GPU; without one, that it compiles, and for which weights it is proposed."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="these products need Triton's Gluon")

from pd_kernels import reference
from pd_kernels.gluon_gated import GatedProduct, propose_gated
from tests.kernels.compiler import compile_by

EVENTS = {
    "wgmma.mma_async": "multiply",
    "wgmma.wait_group.sync.aligned 0;": "wait for all",
    "wgmma.wait_group.sync.aligned 1;": "wait for the turn before",
    "bar.sync": "meet",  # the four warps of a group, before one thread speaks for all
    "mbarrier.arrive.shared::cta": "give back",
    "stmatrix": "write",
    "fence.proxy.async": "show",  # writes are visible to the copy that stores them
    "cp.async.bulk.tensor.2d.global": "store",
    "cp.async.bulk.wait_group.read": "wait for stored",
}
TURN = ["multiply", "wait for the turn before", "meet", "give back"]
TILE_END = ["wait for all", "meet", "give back", "wait for stored", "meet", "write", "show", "meet", "store"]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [(512, 512, 256), (1, 256, 8), (129, 1008, 1000), (2047, 8192, 1024), (3000, 528, 4096)],
)
def test_it_equals_the_reference(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    """In float64, to three units of the type: the gate, its activation and the product are each rounded."""
    generator = torch.Generator("cuda").manual_seed(num_rows)
    x = torch.randn(num_rows, num_inputs, device="cuda", generator=generator).to(dtype)
    weight = (torch.randn(num_outputs, num_inputs, device="cuda", generator=generator) * num_inputs**-0.5).to(dtype)
    found = GatedProduct()(x, weight).double()
    expected = reference.linear(x.double(), weight.double(), None, gated=True)
    unit = torch.finfo(dtype).eps
    assert found.shape == expected.shape
    assert torch.all((found - expected).abs() <= 3 * unit * expected.abs() + unit * 0.2)


@pytest.mark.gpu
@on_hopper
def test_many_replays_are_bit_by_bit_the_same() -> None:
    """Weights from the cache and from memory: in either order, no warp reads a stage before it has arrived."""
    x = torch.randn(1500, 1024, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(6144, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    product = GatedProduct()
    first = [product(x, weight) for weight in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [product(x, weight) for weight in weights]
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.gpu
@on_hopper
def test_rows_for_half_a_tile_of_whole_16_bytes_are_proposed_for() -> None:
    weight = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    assert propose_gated(65, weight) == [GatedProduct()]
    others = (64, weight), (512, weight.float()), (512, weight[:, :60].contiguous()), (512, weight[:, :32])
    assert not any(propose_gated(num_rows, other) for num_rows, other in (*others, (512, weight[:56])))


def test_nothing_is_proposed_for_a_cpu() -> None:
    assert propose_gated(8192, torch.zeros(64, 64, dtype=torch.bfloat16)) == []


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For a Hopper GPU: what ptxas says of it, Gluon's IR and the PTX."""
    done = compile_by("tests.kernels.hopper_gated", tmp_path_factory.mktemp("triton"))
    return done.output


def test_it_compiles_for_a_hopper_gpu_and_keeps_its_sums_in_registers(compiled: str) -> None:
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in compiled
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in compiled


def test_no_warp_overwrites_a_tile_that_is_still_read(compiled: str) -> None:
    """What the kernel must do in this order, in both groups; a missing wait would rarely show in its results."""
    names = "|".join(re.escape(name) for name in EVENTS)
    events = [EVENTS[name] for name in re.findall(names, compiled)]
    repeated = {"multiply", "write"}
    events = [
        event for event, before in zip(events, ["", *events], strict=False) if event != before or event not in repeated
    ]
    for order in (TURN, TILE_END):
        length = len(order)
        assert sum(events[at : at + length] == order for at in range(len(events))) == 2, events
    assert [events.count(event) for event in ("give back", "wait for all", "wait for stored")] == [4, 2, 4]
    # Triton 3.7 shows what is written even if the kernel forgets to, 3.6 does not
    assert len(re.findall(r"ttg\.local_store .*\n *ttng\.fence_async_shared", compiled)) == 2
