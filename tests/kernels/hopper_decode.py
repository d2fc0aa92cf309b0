"""Compile decode attention that takes new tokens from the QKV product for a Hopper GPU; print its PTX as JSON.

No GPU is needed. A process of its own: where the tests run in Triton's interpreter, its kernels cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from pd_kernels.attention import AttentionShape
from pd_kernels.decode_tiling import decode_tiling
from pd_kernels.triton_decode import _decode_kernel

if TYPE_CHECKING:
    from pd_kernels.decode_tiling import DecodeTiling

SHAPES = {"4 KV heads": AttentionShape(32, 4, 128, 64, 1, torch.bfloat16)}


def compile_decode(shape: AttentionShape, tiling: DecodeTiling) -> str:
    """PTX. What ptxas says (registers, spills) is printed."""
    group = shape.heads_per_kv_head
    types = {
        **dict.fromkeys(("query", "query_norm", "key_norm", "cos", "sin"), "*bf16"),
        "slot_mapping": "*i64",
        **dict.fromkeys(("key_cache", "value_cache"), "*bf16"),
        **dict.fromkeys(("block_tables", "seq_lens", "ends", "arrived"), "*i32"),
        "out": "*bf16",
        **dict.fromkeys(("parts", "part_logs"), "*fp32"),
        **dict.fromkeys(("num_seqs", "query_stride", "table_stride", "block_stride", "head_stride"), "i32"),
        **dict.fromkeys(("scale", "eps"), "fp32"),
    }
    constants = {
        "NUM_KV_HEADS": shape.num_kv_heads, "GROUP": group, "SIZE": shape.head_dim, "BLOCK_SIZE": shape.block_size,
        "WINDOW": 0, "TILE": tiling.tile, "SEQS": 1, "ROWS": 16, "COLUMNS": shape.head_dim, "PROGRAMS": 528,
        "MEMBERS": group, "MERGED": 8, "PRECISION": "tf32", "STAGES": tiling.num_stages, "SETUP": tiling.setup,
        "ROTARY": shape.head_dim, "NORM": True, "EARLY": True,
    }  # fmt: skip
    names = _decode_kernel.arg_names
    aligned = [
        name for name in types
        if types[name].startswith("*") or name in ("query_stride", "block_stride", "head_stride")
    ]  # fmt: skip
    source = ASTSource(
        _decode_kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": tiling.num_warps, "launch_pdl": True}
    return str(compile_source(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def main() -> None:
    knobs.nvidia.dump_ptxas_log = True
    json.dump({name: compile_decode(shape, decode_tiling(shape)) for name, shape in SHAPES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
