"""Compile products from a ring of weights for a Hopper GPU, which needs no GPU; print the PTX,
and what ptxas says of it.

A process of its own: where the tests run in Triton's interpreter, its kernels cannot be compiled. Its arguments: rows
and scales of each product, as in "64 blocks" or "16 channels".
"""

from __future__ import annotations

import sys

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_source
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from pd_kernels.gluon_quantized_product import OUTPUTS, REGISTERS, STAGES, _ring_kernel
from pd_kernels.quantized import BLOCK

SPLITS = {16: 4, 64: 2}  # programs that share a tile's inputs, by rows


def compile_product(rows: int, split: int, *, is_blocks: bool) -> str:
    """PTX. What ptxas says (registers, spills) is printed."""
    layout = repr(gl.NVMMASharedLayout(128, 8, rank=2))
    types = {
        "x_tiles": f"tensordesc<fp8e4nv[{rows}, {BLOCK}],{layout}>",
        "weight_tiles": f"tensordesc<fp8e4nv[{OUTPUTS}, {BLOCK}],{layout}>",
        **dict.fromkeys(("x_scales", "weight_scales", "parts"), "*fp32"),
        **dict.fromkeys(("num_rows", "num_outputs", "num_inputs", "row_stride", "group_stride"), "i32"),
        "out": "*bf16",
        "arrived": "*i32",
    }
    constants = {
        "STAGES": STAGES[rows], "SPLIT": split, "SHARE": 64, "ROWS": rows, "OUTPUTS": OUTPUTS, "BLOCKS": is_blocks,
    }  # fmt: skip
    names = _ring_kernel.arg_names
    aligned = [name for name in types if types[name].startswith("*") or name in ("num_outputs", "num_inputs")]
    source = GluonASTSource(
        _ring_kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": True}
    return str(compile_source(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


if __name__ == "__main__":
    knobs.nvidia.dump_ptxas_log = True
    for wanted in sys.argv[1:]:
        number_of_rows, kind = wanted.split()
        programs = SPLITS[int(number_of_rows)]
        sys.stdout.write(compile_product(int(number_of_rows), programs, is_blocks=kind == "blocks"))
