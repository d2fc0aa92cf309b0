"""Compile decode attention for a Hopper GPU, where new tokens come from the QKV product and where there are drafts.

Prints the PTX as JSON.

No GPU is needed. A process of its own: where the tests run in Triton's interpreter, its kernels cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from pd_kernels.attention import AttentionShape
from pd_kernels.decode_tiling import decode_tiling
from pd_kernels.triton_decode import _decode_kernel
from pd_kernels.triton_draft_attention import _draft_kernel, draft_tiling, queries_of_pair
from pd_kernels.triton_split_decode import _NUM_WARPS, _split_kernel

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

    from pd_kernels.decode_tiling import DecodeTiling

SHAPE = AttentionShape(32, 4, 128, 64, 1, torch.bfloat16)
SUNK = AttentionShape(64, 8, 64, 64, 1, torch.bfloat16, has_sinks=True)  # gpt-oss's


def compile_decode(shape: AttentionShape, tiling: DecodeTiling) -> str:
    """PTX. What ptxas says (registers, spills) is printed."""
    types = {"ends": "*i32", "num_seqs": "i32", "query": "*bf16", "query_stride": "i32"}
    constants = {"SEQS": 1, "PROGRAMS": 528, "MEMBERS": shape.heads_per_kv_head, "MERGED": 8, "SETUP": tiling.setup}
    return _compile(_decode_kernel, shape, tiling, types, constants, tiling.num_warps)


def compile_split(shape: AttentionShape, tiling: DecodeTiling) -> str:
    """PTX of the kernel for few sequences, as `compile_decode`."""
    types = {"heads": "*bf16", "heads_stride": "i32"}
    constants = {"SPLITS": tiling.splits, "SLICE": shape.heads_per_kv_head * shape.head_dim // tiling.splits}
    return _compile(_split_kernel, shape, tiling, types, constants, _NUM_WARPS)


def compile_drafts(shape: AttentionShape, tiling: DecodeTiling) -> str:
    """PTX of the kernel for decodes with drafts, as `compile_decode`."""
    tiling, num_queries = draft_tiling(tiling), queries_of_pair(shape)
    types = {"query": "*bf16", "query_starts": "*i32", "ends": "*i32"}
    types |= dict.fromkeys(("num_seqs", "num_tokens", "query_stride"), "i32")
    rows = num_queries * shape.heads_per_kv_head
    constants = {"SEQS": 256, "PROGRAMS": 264, "QUERIES": num_queries, "MERGED": max(8192 // rows // shape.head_dim, 1)}
    constants |= {"SETUP": tiling.setup, "ROWS": rows}
    return _compile(_draft_kernel, shape, tiling, types, constants, tiling.num_warps)


def _compile(
    kernel: JITFunction[Any], shape: AttentionShape, tiling: DecodeTiling, own_types: dict[str, str],
    own_constants: dict[str, int], num_warps: int,
) -> str:  # fmt: skip
    types = {
        **own_types,
        **dict.fromkeys(("query_norm", "key_norm", "cos", "sin", "key_cache", "value_cache", "out"), "*bf16"),
        "slot_mapping": "*i64",
        **dict.fromkeys(("block_tables", "seq_lens", "arrived"), "*i32"),
        **dict.fromkeys(("parts", "part_logs", "sinks"), "*fp32"),
        **dict.fromkeys(("table_stride", "block_stride", "head_stride"), "i32"),
        **dict.fromkeys(("scale", "eps"), "fp32"),
    }
    constants = {
        "NUM_KV_HEADS": shape.num_kv_heads, "GROUP": shape.heads_per_kv_head, "SIZE": shape.head_dim,
        "BLOCK_SIZE": shape.block_size, "WINDOW": 0, "TILE": tiling.tile, "ROWS": 16, "COLUMNS": shape.head_dim,
        "PRECISION": "tf32", "STAGES": tiling.num_stages, "ROTARY": shape.head_dim, "NORM": True, "EARLY": True,
        "SINKS": shape.has_sinks,
    } | own_constants  # fmt: skip
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    names, unaligned = kernel.arg_names, ("arrived", "num_seqs", "table_stride", "scale", "eps")
    source = ASTSource(
        kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in types if name not in unaligned},
    )
    options = {"num_warps": num_warps, "launch_pdl": True}
    return str(compile_source(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def main() -> None:
    knobs.nvidia.dump_ptxas_log = True
    compilers = {"shares": compile_decode, "splits": compile_split, "drafts": compile_drafts}
    found = {name: compiler(SHAPE, decode_tiling(SHAPE)) for name, compiler in compilers.items()}
    sunk = {f"{name}, sinks": compiler(SUNK, decode_tiling(SUNK)) for name, compiler in compilers.items()}
    json.dump(found | sunk, sys.stdout)


if __name__ == "__main__":
    main()
