"""The ring of weights: what a Hopper GPU is told to do. Its results: see test_triton_quantized_product."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels.gluon_quantized_product import ring_split, runs_on
from tests.kernels.compiler import compile_by

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("first", "second"),
    [("16 channels", "64 blocks"), pytest.param("16 blocks", "64 channels", marks=pytest.mark.slow)],
)
def test_weights_are_asked_for_before_the_wait_and_sums_stay_in_registers(
    first: str, second: str, tmp_path: Path
) -> None:
    done = compile_by("tests.kernels.hopper_quantized_product", tmp_path, first, second)
    assert done.output.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 2
    compiled = done.output.split(".visible .entry")[1:]
    assert len(compiled) == 2
    for ptx in compiled:
        events = re.findall(r"griddepcontrol\.\w+|cp\.async\.bulk\.tensor|wgmma\.mma_async|wgmma\.wait_group|bar\.sync|"
                            r"mbarrier\.arrive\.shared|mbarrier\.arrive\.expect_tx", ptx)  # fmt: skip
        assert events[0] == "griddepcontrol.launch_dependents"
        asked = events.index("mbarrier.arrive.expect_tx")
        assert events[asked : asked + 4] == [
            "mbarrier.arrive.expect_tx", "cp.async.bulk.tensor", "griddepcontrol.wait", "cp.async.bulk.tensor",
        ]  # fmt: skip
        # A stage is given back when all warps have multiplied it
        last = len(events) - events[::-1].index("wgmma.mma_async") - 1
        assert events[last + 1 : last + 4] == ["wgmma.wait_group", "bar.sync", "mbarrier.arrive.shared"]


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (28672, 4096), (64, 128), (4096, 11008)])
def test_every_program_has_inputs(rows: int, outputs: int, inputs: int) -> None:
    split, num_tiles, groups = ring_split(rows, outputs, inputs, 132), -(-outputs // 64), -(-inputs // 128)
    assert (split - 1) * -(-groups // split) < groups
    assert split == 1 or num_tiles * split <= 264


def test_it_does_not_run_on_a_cpu() -> None:
    assert not runs_on(torch.device("cpu"))
