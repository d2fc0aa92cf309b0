"""What the interpreter cannot show: that Triton takes the kernel, and what a Hopper GPU is told to do."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("triton", reason="the Triton kernels need triton")

from tests.kernels.compiler import compile_by

if TYPE_CHECKING:
    from pathlib import Path

# Each mode, type and number of rows is among the first ones
WHICH = pytest.mark.parametrize("which", [[], pytest.param(["others"], marks=pytest.mark.slow)], ids=["", "others"])


def kernels_by(module: str, cache: Path, *arguments: str) -> tuple[dict[str, str], str]:
    """What a module that compiles kernels prints: the PTX of each kernel by its name, and the log."""
    done = compile_by(module, cache, *arguments)
    return json.loads(done.output[done.output.index("{") :]), done.output + done.log


@WHICH
def test_products_of_experts_use_the_matrix_unit_and_spill_no_registers(which: list[str], tmp_path: Path) -> None:
    found, log = kernels_by("tests.kernels.hopper_experts", tmp_path, *which)
    assert len(found) == 4
    for name, ptx in found.items():
        assert "cp.async.bulk.tensor" in ptx, name
        assert re.search(r"wgmma\.mma_async\S+" + ("e4m3" if "float8" in name else "bf16"), ptx), name
        assert_registers_are_read(ptx, name)
        if "down bfloat16" in name:  # of one rank, of which perhaps no program has work
            assert ptx.count("griddepcontrol.wait") == 2, name
    assert len(re.findall("spill stores", log)) >= len(found)
    assert re.findall(r"([1-9]\d*) bytes spill stores", log) == []


@WHICH
def test_products_of_few_rows_hold_weights_ahead_in_registers_and_let_them_be_read(
    which: list[str], tmp_path: Path
) -> None:
    found, _ = kernels_by("tests.kernels.hopper", tmp_path, *which)
    assert len(found) == (2 if which else 3)
    for name, ptx in found.items():
        ahead, behind = ptx.split("griddepcontrol.wait", 1)
        assert "griddepcontrol.launch_dependents" in ahead, name
        assert len(re.findall(r"ld\.global\S*\.v4\.", ahead)) >= 8, name
        assert "cp.async.bulk.tensor" in behind, name
        assert len(re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*\{", behind)) >= 8, name  # left operand in registers
        assert_registers_are_read(ptx, name)


def test_sums_over_ranks_publish_what_is_written_and_read_what_has_come(tmp_path: Path) -> None:
    """Whole words of 16 bytes to and from the buffers; flags are set after a barrier, and with the release of all."""
    found, _ = kernels_by("tests.kernels.hopper_reduce", tmp_path)
    assert len(found) == 4
    for name, ptx in found.items():
        num_peers = 3 if "4 ranks" in name else 1
        ahead, behind = ptx.split("griddepcontrol.wait", 1)
        assert "griddepcontrol.launch_dependents" in ahead, name
        assert "st.global" not in ahead, name
        written, published = behind.split("atom.global.sys.release.exch", 1)
        assert len(re.findall(r"st\.global\.v4\.b32", written)) == num_peers, name
        assert "bar.sync" in written.rpartition("st.global")[2], name
        assert published.count("atom.global.sys.release.exch") == num_peers - 1, name
        waited, added = published.rsplit("sys.acquire", 1)
        assert waited.count("sys.acquire") == num_peers - 1, name
        assert "ld.global.cg" not in waited, name
        assert len(re.findall(r"ld\.global\.cg\.v4\.b32", added)) == num_peers, name
        assert not re.search(r"(ld|st)\.global\S*\.b16", ptx), name


@pytest.mark.slow
def test_states_stay_in_registers(tmp_path: Path) -> None:
    """A state is read before the kernels ahead end; what depends on it passes no shared memory between products."""
    found, log = kernels_by("tests.kernels.hopper_state", tmp_path)
    ahead, behind = found["decode"].split("griddepcontrol.wait", 1)
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ahead)) >= 16
    assert "st.global" not in ahead
    assert len(re.findall(r"st\.global\S*\.v4\.b32", behind)) >= 32  # to the slot, and to that of a saved state
    in_registers = r"wgmma\.mma_async\S+m64n\d+k16\.f32\.bf16\.bf16\s*\{[^}]*\},\s*\{"
    assert len(re.findall(in_registers, found["states"])) == 28
    assert_registers_are_read(found["states"], "states")
    for name, ptx in found.items():
        assert not re.search(r"\b(atom|red)\.", ptx), name
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0"] * len(found)


@pytest.mark.slow
def test_new_tokens_wait_for_the_product_and_old_ones_do_not(tmp_path: Path) -> None:
    """No barrier but those of conversions that the matrix unit needs stands between the product and its use.

    Decodes with drafts have no new tokens: another kernel writes these, and no program reads anything before it ends.
    """
    found, log = kernels_by("tests.kernels.hopper_decode", tmp_path)
    ahead, behind = found["shares"].split("griddepcontrol.wait", 1)
    ahead = ahead.rpartition("bra ")[2]  # of this pair
    assert "st.global" not in ahead
    assert ahead.count("cp.async.bulk.prefetch.L2.global") == 2
    rotation = behind.split("cp.async.cg", 1)[0]
    assert "rsqrt" in rotation
    assert rotation.count("bar.sync") <= 8
    assert_parts_are_published(found["splits"])
    assert_a_warpgroup_multiplies(found["drafts"])
    assert re.findall(r"properties for _draft_kernel\s.*?(\d+) bytes spill stores", log) == ["0", "0"]
    assert_a_warpgroup_multiplies(found["drafts, sinks"])
    for name in ("shares, sinks", "splits, sinks"):
        assert not re.search(r"st\.global|atom\.", found[name].split("griddepcontrol.wait", 1)[0].rpartition("bra ")[2])


@WHICH
def test_tiles_of_latents_are_keys_and_values(which: list[str], tmp_path: Path) -> None:
    """A tile is in shared memory once, two programs of decodes share a multiprocessor, and nothing is read early."""
    done = compile_by("tests.kernels.hopper_latent", tmp_path, *which)
    found = json.loads(done.output[done.output.index("{") :])
    for name, ptx in found["ptx"].items():
        shared = found["shared"][name]
        assert_registers_are_read(ptx, name)
        if name.startswith("prefill"):
            assert "mma.sync" not in ptx, name
            assert shared <= 227 << 10, name
            assert "wgmma.mma_async" in ptx, name
            continue
        ahead, behind = ptx.split("griddepcontrol.wait", 1)
        assert "griddepcontrol.launch_dependents" in ahead, name
        assert not re.search(r"st\.global|atom\.", ahead), name
        if name.startswith("decode"):
            rank = 256 if "256" in name else 512
            assert "mma.sync" in behind, name  # of 16 rows; a warpgroup takes 64 at least
            assert "wgmma" not in behind, name
            assert "cp.async.cg" in behind, name  # a tile comes while another one is multiplied
            assert 64 * (rank + 64) * 2 < shared <= 113 << 10, name
            written = behind.split("atom.global.gpu.acq_rel.add", 1)[0]
            assert "bar.sync" in written.rpartition("st.global")[2], name


def assert_a_warpgroup_multiplies(ptx: str) -> None:
    """Rows of drafts, and parts of them are counted after a barrier and read past the L1 cache."""
    ahead, behind = ptx.split("griddepcontrol.wait", 1)
    assert "griddepcontrol.launch_dependents" in ahead
    assert not re.search(r"st\.global|atom\.", ahead)
    assert re.search(r"wgmma\.mma_async\S+m64n\d+k16\.f32\.bf16", behind)
    assert "mma.sync" not in behind
    assert_registers_are_read(ptx, "drafts")
    written, merged = behind.split("atom.global.gpu.acq_rel.add", 1)
    assert "bar.sync" in written.rpartition("st.global")[2]
    assert len(re.findall(r"ld\.global\.cg\.v4\.b32", merged)) >= 16


def assert_parts_are_published(ptx: str) -> None:
    """Parts are written, then counted after a barrier; they are read past the L1 cache once the count is acquired."""
    ahead, behind = ptx.split("griddepcontrol.wait", 1)
    assert not re.search(r"st\.global|atom\.|griddepcontrol\.wait", ahead)
    assert len(re.findall(r"ld\.global\.v4\.b32", ahead)) >= 16  # keys and values of the first tile
    written, counted = behind.split("atom.global.gpu.acq_rel.add", 1)
    assert "bar.sync" in written.rpartition("st.global")[2]
    spin, merged = counted.split("gpu.acquire", 1)
    assert "ld.global.cg" not in spin
    assert "bar.sync" in merged.split("ld.global", 1)[0]
    assert set(re.findall(r"ld\.global\.\w+", merged)) == {"ld.global.cg"}


def assert_registers_are_read(ptx: str, name: str) -> None:
    """A loop that loads a matrix unit's left operand into registers ends with nothing left that may still read them.

    Otherwise the next turn overwrites them: wrong sums wherever the tiles come faster than they are multiplied.
    """
    for label, body in re.findall(r"(\$L__BB\d+_\d+):(.*?)\bbra\s+\1;", ptx, re.DOTALL):
        if "ldmatrix" in body and "wgmma.mma_async" in body:
            behind = body.rpartition("wgmma.mma_async")[2]
            assert "wgmma.wait_group.sync.aligned 0;" in behind, f"{name}: {label}"
