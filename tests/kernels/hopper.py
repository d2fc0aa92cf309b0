"""Compile the products of few rows for a Hopper GPU, which none is needed for; print their PTX as JSON.

With the argument `others`: those that are compiled before a release.

A process of its own: where the tests run in Triton's interpreter, its kernels cannot be compiled.
"""

from __future__ import annotations

import json
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from pd_kernels.triton_matmul import MatmulTiling, _linear_kernel, matmul_tiling

MODES = {"gated": (True, False, True), "added": (False, True, False), "plain": (False, False, False)}
"""Gated, adds, divides: see the kernel."""
COMPILED = (("gated", 64), ("added", 32), ("plain", 1))
"""Each mode and each number of rows; all nine together take 11 s of CPU."""
OTHERS = (("gated", 1), ("plain", 64))


def compile_product(num_rows: int, tiling: MatmulTiling, gated: bool, adds: bool, divides: bool) -> str:
    """PTX."""
    rows, halves = max(16, num_rows), 2 if gated else 1
    floats, integers = ("parts", "left_squares", "squares"), ("num_rows", "split", "num_squares")
    types = {
        "x_tiles": f"tensordesc<bf16[{rows},{tiling.inputs}]>",
        "weight_tiles": f"tensordesc<bf16[{halves},{tiling.outputs // halves},{tiling.inputs}]>",
        **dict.fromkeys(("x", "weight", "bias", "out", "residual", "gain"), "*bf16"),
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys((*integers, "num_outputs", "num_inputs", "x_stride"), "i32"),
        "arrived": "*i32",
        "eps": "fp32",
    }
    constants = {
        "SPLIT": tiling.split > 1, "ROWS": rows, "OUTPUTS": tiling.outputs, "INPUTS": tiling.inputs,
        "HEAD": tiling.head, "GATED": gated, "ADDS": adds, "DIVIDES": divides, "SQUARES": 64, "BIAS": False,
        "STAGES": tiling.num_stages, "EARLY": True,
    }  # fmt: skip
    names = _linear_kernel.arg_names
    aligned = [
        name for name in types if types[name].startswith("*") or name in ("num_outputs", "num_inputs", "x_stride")
    ]
    source = ASTSource(
        _linear_kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": tiling.num_warps, "launch_pdl": True}
    return str(compile_source(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def main() -> None:
    found = {
        f"{mode} {num_rows}": compile_product(num_rows, matmul_tiling(4096, 4096, num_rows, 132), *MODES[mode])
        for mode, num_rows in (OTHERS if sys.argv[1:] == ["others"] else COMPILED)
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
