"""Compile the sums over ranks for a Hopper GPU, which none is needed for; print their PTX as JSON."""

from __future__ import annotations

import json
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from pd_kernels.triton_reduce import _reduce_kernel

COMPILED = {"sum": (0, 1024, 2), "norm": (1, 4096, 2), "half norm": (2, 1024, 2), "norm of 4 ranks": (1, 4096, 4)}
"""Mode, columns of a block, ranks: see the kernel."""


def compile_reduce(mode: int, columns: int, num_ranks: int) -> str:
    """PTX of the last but one rank's kernel, for rows of 4,096 columns."""
    types = {
        **dict.fromkeys(("partial", "residual", "weight"), "*bf16"),
        "squares": "*fp32", "addresses": "*i64", "turns": "*i32", "num_rows": "i32", "residual_stride": "i32",
        "eps": "fp32",
    }  # fmt: skip
    constants = {
        "WIDTH": 4096, "COLUMNS": columns, "PIECES": 4096 // columns, "MODE": mode, "RANK": num_ranks - 2,
        "RANKS": num_ranks, "BLOCKS": 256, "SLOT": 4096, "EARLY": True,
    }  # fmt: skip
    names = _reduce_kernel.arg_names
    aligned = [name for name in types if types[name].startswith("*") or name == "residual_stride"]
    source = ASTSource(
        _reduce_kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": columns // 256, "launch_pdl": True}
    return str(compile_source(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def main() -> None:
    json.dump({name: compile_reduce(*arguments) for name, arguments in COMPILED.items()}, sys.stdout)


if __name__ == "__main__":
    main()
