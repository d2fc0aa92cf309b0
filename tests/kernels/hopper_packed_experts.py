"""Compile the products of experts in MXFP4 for a Hopper GPU, which needs no GPU; print the PTX of both.

Its argument: the rows of a tile.

A process of its own: where the tests run in Triton's interpreter, its kernels cannot be compiled.
"""

from __future__ import annotations

import sys

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_source
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from pd_kernels.gluon_mxfp4_experts import MULTIPLIERS_AND_COPIER, REGISTERS, _experts_kernel
from pd_kernels.gluon_mxfp4_ring import AT_ONCE, FIRST, STAGES


def compile_product(rows: int, is_gated: bool) -> str:
    """The PTX. What ptxas says (registers, spills) is printed."""
    knobs.nvidia.dump_ptxas_log = True
    layouts = {bits: repr(gl.NVMMASharedLayout(128, bits, rank=2)) for bits in (8, 16, 32)}
    parts = not is_gated and rows <= 8
    types = {
        "row_tiles": f"tensordesc<bf16[{AT_ONCE[rows]}, 64],{layouts[16]}>",
        "value_tiles": f"tensordesc<u8[{FIRST * 16}, 128],{layouts[8]}>",
        "last_value_tiles": f"tensordesc<u8[16, 128],{layouts[8]}>",
        "scale_tiles": f"tensordesc<i32[{FIRST}, 32],{layouts[32]}>",
        "out": "*fp32" if parts else "*bf16",
        **dict.fromkeys(("bias", "scores"), "*fp32"),
        **dict.fromkeys(("order", "tiles"), "*i32"),
        **dict.fromkeys(("num_tiles", "num_across", "num_steps", "num_outputs", "num_rows", "num_chosen"), "i32"),
        **dict.fromkeys(("limit", "alpha"), "fp32"),
    }
    more, less = MULTIPLIERS_AND_COPIER
    constants = {
        "GATED": is_gated, "PARTS": parts, "SPLIT": 2 if parts else 1, "STAGES": STAGES[rows], "ROWS": rows,
        "AT_ONCE": AT_ONCE[rows], "MORE": more, "LESS": less,
    }  # fmt: skip
    names = _experts_kernel.arg_names
    aligned = [name for name in types if types[name].startswith("*") or name == "num_outputs"]
    source = GluonASTSource(
        _experts_kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": True}
    compiled = compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)
    sys.stdout.write(f"{compiled.metadata.shared} bytes of shared memory\n")
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    for is_gated in (True, False):
        sys.stdout.write(compile_product(int(sys.argv[1]), is_gated))
