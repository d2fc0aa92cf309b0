"""SwiGLU with its product: on a Hopper GPU what they come to, without one that they compile for it, and for whom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="these products need Triton's Gluon")

from pd_kernels import reference
from pd_kernels.gluon_gated import GatedProduct, propose_gated

if TYPE_CHECKING:
    from pathlib import Path

COMPILE_S = 240.0
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
    """Weights from the cache and from memory: whoever comes first, nobody reads what is not there yet."""
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


def test_it_compiles_for_a_hopper_gpu_and_keeps_its_sums_in_registers(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.kernels.hopper_gated"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    assert done.returncode == 0, done.stderr
    ptx = done.stdout
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in ptx
    assert not re.search(r"\b(ld|st)\.local", ptx)
    # A stage is given back by one thread for all of a group: behind a barrier, when no product reads it any more
    for before in ptx.split("mbarrier.arrive.shared::cta")[:-1]:
        waited = before.rpartition("wgmma.wait_group")[2]
        assert "wgmma.mma_async" not in waited
        assert "bar.sync" in waited
