"""Compile the products of many rows with experts in float8 for a Hopper GPU, which needs no GPU; print the result.

Its argument: `gated`, or `down` for the plain product.

A process of its own: where the tests run in Triton's interpreter, its kernels cannot be compiled.
"""

from __future__ import annotations

import sys

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_source
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from pd_kernels.gluon_experts import ROWS, STAGES, _experts_kernel
from pd_kernels.quantized import BLOCK


def compile_product(is_gated: bool) -> str:
    """The IR as Gluon hands it to the compiler, and the PTX. What ptxas says (registers, spills) is printed."""
    knobs.nvidia.dump_ptxas_log = True
    layouts = {bits: repr(gl.NVMMASharedLayout(128, bits, rank=2)) for bits in (8, 16)}
    out = f"fp8e4nv[{ROWS // 2}, {BLOCK}],{layouts[8]}" if is_gated else f"bf16[{ROWS // 2}, {BLOCK}],{layouts[16]}"
    types = {
        "x_tiles": f"tensordesc<fp8e4nv[{ROWS}, {BLOCK}],{layouts[8]}>",
        "weight_tiles": f"tensordesc<fp8e4nv[{BLOCK}, {BLOCK}],{layouts[8]}>",
        "out_tiles": f"tensordesc<{out}>",
        "experts": "*i32",
        **dict.fromkeys(("x_scales", "weight_scales", "out_scales"), "*fp32"),
        **dict.fromkeys(("num_tiles", "num_rows", "num_outputs", "num_inputs"), "i32"),
    }
    constants = {"GATED": is_gated, "STAGES": STAGES, "ROWS": ROWS}
    names = _experts_kernel.arg_names
    sizes = ("num_rows", "num_outputs", "num_inputs")
    aligned = [name for name in types if types[name].startswith("*") or name in sizes]
    source = GluonASTSource(
        _experts_kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 4, "maxnreg": 168}
    compiled = compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)
    return f"{compiled.metadata.shared} bytes shared\n{compiled.asm['source']}\n{compiled.asm['ptx']}"


if __name__ == "__main__":
    sys.stdout.write(compile_product(sys.argv[1] == "gated"))
