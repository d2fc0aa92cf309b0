"""Compile fused SwiGLU for a Hopper GPU, which needs no GPU; print the result.

A process of its own: where the tests run in Triton's interpreter, its kernels cannot be compiled.
"""

from __future__ import annotations

import sys

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_source
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from pd_kernels.gluon_gated import DOWN, INPUTS, OUTPUTS, ROWS, STAGES, _gated_kernel


def compile_product() -> str:
    """The IR as Gluon hands it to the compiler, and the PTX. What ptxas says (registers, spills) is printed."""
    knobs.nvidia.dump_ptxas_log = True
    layout = repr(gl.NVMMASharedLayout(128, 16, rank=2))
    types = {
        "x_tiles": f"tensordesc<bf16[{ROWS}, {INPUTS}],{layout}>",
        "weight_tiles": f"tensordesc<bf16[{OUTPUTS}, {INPUTS}],{layout}>",
        "out_tiles": f"tensordesc<bf16[{ROWS // 2}, {OUTPUTS}],{layout}>",
        **dict.fromkeys(("num_rows", "num_outputs", "num_inputs"), "i32"),
    }
    constants = {"DOWN": DOWN, "STAGES": STAGES, "ROWS": ROWS, "OUTPUTS": OUTPUTS, "INPUTS": INPUTS}
    names = _gated_kernel.arg_names
    source = GluonASTSource(
        _gated_kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("num_outputs", "num_inputs")},
    )
    options = {"num_warps": 4, "maxnreg": 168}
    compiled = compile_source(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    return f"{compiled['source']}\n{compiled['ptx']}"


if __name__ == "__main__":
    sys.stdout.write(compile_product())
