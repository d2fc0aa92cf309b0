"""Compile the delta rule for a Hopper GPU, which needs no GPU; print the PTX of each kernel as JSON.

A process of its own: where the tests run in Triton's interpreter, its kernels cannot be compiled. What ptxas says
(registers, spills) is printed before it. The sizes are those of Qwen3-Next, Qwen3.5 and later.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from pd_kernels import triton_convolution
from pd_kernels.state import PIECE
from pd_kernels.triton_delta_decode import DECODE_TILE, _decode_kernel
from pd_kernels.triton_delta_pieces import PIECES_TILE, PiecesTile, _states_kernel, _triangles_kernel
from pd_kernels.triton_state import _gates_kernel, _norm_kernel

PLACES = dict.fromkeys(("sources", "slots", "starts", "positions", "piece_starts", "saves"), "*i32")
ROWS = dict.fromkeys(("q", "k", "v", "x", "a", "b", "gate", "weight", "bias", "conv", "out", "triangles"), "*bf16")
WIDE = dict.fromkeys(
    ("g", "beta", "recurrent", "factors", "decays", "betas", "decay_log", "decay_bias", "scales"), "*fp32"
)  # fmt: skip
NUMBERS = dict.fromkeys(("scale", "eps"), "fp32")
SIZE = {"KEYS": 128, "SIZE": PIECE, "PRECISION": PIECES_TILE.precision}
CONVOLVED = {"KEYS": 2048, "KEY_DIM": 128, "VALUES": 256, "WIDTH": 4, "BIAS": False, "SAVES": True}


def compile_kernel(kernel: Any, constants: dict[str, Any], other: dict[str, str] | None = None, **options: Any) -> str:
    """PTX. `other`: types that differ from the usual ones."""
    names, known = kernel.arg_names, {**PLACES, **ROWS, **WIDE, **NUMBERS, **(other or {})}
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: "constexpr" if name in constants else known.get(name, "i32") for name in names}
    aligned = [name for name in names if types[name].startswith("*") or name.endswith(("_stride", "_channels"))]
    source = ASTSource(
        kernel, types, constants, {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    )  # fmt: skip
    return str(compile_source(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def compile_states(tile: PiecesTile) -> str:
    constants = {**SIZE, "VALUES": 128, "PART": tile.values, "STAGES": tile.num_stages, "SAVES": True}
    return compile_kernel(_states_kernel, constants, num_warps=tile.num_warps)


def main() -> None:
    knobs.nvidia.dump_ptxas_log = True
    decode = {"KEYS": 128, "VALUES": 128, "PART": DECODE_TILE.values, "MIXED": False, "SAVES": True, "EARLY": True,
              "GATES": True}  # fmt: skip
    early: dict[str, Any] = {"num_warps": DECODE_TILE.num_warps, "launch_pdl": True}
    pieces = {**CONVOLVED, "SIZE": PIECE, "CHANNELS": triton_convolution.PIECE_CHANNELS}
    pieces["ROWS"] = triton_convolution.PIECE_ROWS
    convolved = {**CONVOLVED, "CHANNELS": triton_convolution.DECODE_CHANNELS}
    norm = {"SIZE": 128, "COLUMNS": 128, "ROWS": 8, "EARLY": True}
    found = {
        "decode": compile_kernel(_decode_kernel, decode, dict.fromkeys(("g", "beta"), "*bf16"), **early),
        "triangles": compile_kernel(_triangles_kernel, SIZE, num_warps=PIECES_TILE.triangle_warps),
        "states": compile_states(PIECES_TILE),
        "convolved pieces": compile_kernel(triton_convolution._pieces_kernel, pieces, num_warps=4),
        "convolved states": compile_kernel(triton_convolution._states_kernel, convolved),
        "convolved decodes": compile_kernel(triton_convolution._decode_kernel, {**convolved, "EARLY": True}, **early),
        "gates": compile_kernel(_gates_kernel, {"TILE": 1024, "EARLY": True}, **early),
        "norms": compile_kernel(_norm_kernel, {**norm, "HEADS": 0}, **early),
        "quantized norms": compile_kernel(_norm_kernel, {**norm, "HEADS": 32}, {"out": "*fp8e4nv"}, **early),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
