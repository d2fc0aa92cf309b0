"""Compile the products of experts for a Hopper GPU, which needs no GPU; print the PTX of each as JSON.

A process of its own: where the tests run in Triton's interpreter, its kernels cannot be compiled. What ptxas says
(registers, spills) is printed before it. With the argument `others`: those that are compiled before a release.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from pd_kernels.expert_tiling import FEW, ExpertTiling, experts_tiling
from pd_kernels.triton_experts import _down_kernel, _gate_up_kernel

PLACES = {"chosen": "*i64", "order": "*i32", "tiles": "*i32", "num_tokens": "i32", "num_tiles": "i32",
          "first_own": "i32", "num_own": "i32"}  # fmt: skip
SIZES = dict.fromkeys(("num_outputs", "num_inputs"), "i32")
COMPILED, OTHERS = ((1, False), (8192, True)), ((1, True), (8192, False))
"""Tokens, and whether weights are in float8."""


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], tiling: ExpertTiling) -> str:
    """PTX."""
    aligned = [name for name in types if types[name].startswith("*") or name in (*SIZES, "x_stride")]
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": tiling.num_warps, "launch_pdl": True}
    return str(compile_source(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def compile_products(num_tokens: int, is_quantized: bool) -> dict[str, str]:
    """The PTX of both products of Qwen3-30B-A3B, in bfloat16 or in blocks of float8."""
    dtype, scale = ("fp8e4nv", "*fp32") if is_quantized else ("bf16", "*bf16")
    first, second = experts_tiling(num_tokens, 8, 128, 1 if is_quantized else 2)
    operands = {"scales": scale, "x": f"*{dtype}", "row_scales": scale, "out": "*bf16", **PLACES, **SIZES}
    operands |= dict.fromkeys(("row_stride", "group_stride"), "i32")
    common = {"KIND": 3 if is_quantized else 0, "NUM_CHOSEN": 8, "CHOSEN": 8, "SORTED": num_tokens > FEW, "EARLY": True}
    common |= {"PART": not is_quantized, "DTYPE": tl.bfloat16}  # of one rank in bfloat16, of all experts in float8
    in_first, in_second = is_quantized and num_tokens > FEW, is_quantized and num_tokens <= FEW
    activated = "*fp8e4nv" if in_first else "*bf16"  # what is between the products; see `_quantizes`
    rows = {"x": "*bf16", "row_scales": "*bf16"} if in_second else {}
    between = {"out": activated, "out_scales": "*fp32" if in_first else "*bf16", "out_stride": "i32"}
    numbers = {"x_stride": "i32", "num_squares": "i32", "eps": "fp32"}
    gate_up = compile_kernel(
        _gate_up_kernel,
        {"weight_tiles": f"tensordesc<{dtype}[{first.outputs},{first.inputs}]>", **operands, "squares": "*fp32",
         **between, **numbers},
        {**common, **sizes(first), "SQUARES": 32 if num_tokens <= 64 else 0, "QUANTIZES": in_first},
        first,
    )  # fmt: skip
    tiles = {"weight_tiles": f"tensordesc<{dtype}[{second.outputs},{second.inputs}]>"}
    down = compile_kernel(
        _down_kernel,
        {**tiles, **operands, **rows, "scores": "*fp32"},
        {**common, **sizes(second), "PARTS": False, "QUANTIZES": in_second},
        second,
    )
    kind = "float8" if is_quantized else "bfloat16"
    return {f"gate_up {kind} {num_tokens}": gate_up, f"down {kind} {num_tokens}": down}


def sizes(tiling: ExpertTiling) -> dict[str, int]:
    return {"ROWS": tiling.rows, "OUTPUTS": tiling.outputs, "INPUTS": tiling.inputs, "STAGES": tiling.num_stages}


def main() -> None:
    knobs.nvidia.dump_ptxas_log = True
    found: dict[str, str] = {}
    for num_tokens, is_quantized in OTHERS if sys.argv[1:] == ["others"] else COMPILED:
        found |= compile_products(num_tokens, is_quantized)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
