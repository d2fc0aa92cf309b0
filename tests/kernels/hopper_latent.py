"""Compile latent attention for a Hopper GPU, which needs no GPU; print the PTX of each kernel as JSON.

A process of its own: where the tests run in Triton's interpreter, its kernels cannot be compiled. What ptxas says
(registers, spills) is printed before it, and the shared memory of each kernel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from pd_kernels.latent import LatentDims
from pd_kernels.launch_sizes import next_power_of_2
from pd_kernels.triton_decode import MERGED
from pd_kernels.triton_latent import _latent_rows_kernel
from pd_kernels.triton_latent_decode import _MERGED_ALONE, _latent_kernel, latent_tiling
from pd_kernels.triton_latent_prefill import _expanded_kernel, expanded_tiling

MOONLIGHT, GLM, MISTRAL = LatentDims(512, 64, 128, 128), LatentDims(512, 64, 192, 256), LatentDims(256, 64, 64, 128)
PROCESSORS, MANY_ROWS = 132, 1 << 20
ROWS = dict.fromkeys(
    ("q_latent", "q_rope", "cache", "out", "query", "keys", "norm", "cos", "sin", "own", "expanded", "rope"), "*bf16"
)
PLACES = dict.fromkeys(("block_tables", "seq_lens", "query_starts", "ends", "arrived", "tiles"), "*i32")
WIDE = {**dict.fromkeys(("parts", "part_logs", "means", "logs"), "*fp32"), **dict.fromkeys(("scale", "eps"), "fp32")}
UNALIGNED = ("num_seqs", "num_tokens", "num_tiles", "table_stride", "scale", "eps")


def compile_kernel(kernel: Any, constants: dict[str, Any], **options: Any) -> Any:
    names, known = kernel.arg_names, {**ROWS, **PLACES, **WIDE, "slot_mapping": "*i64"}
    types = {name: "constexpr" if name in constants else known.get(name, "i32") for name in names}
    aligned = [name for name in names if types[name] != "constexpr" and name not in UNALIGNED]
    source = ASTSource(
        kernel, types, constants, {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    )  # fmt: skip
    return compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_decode(dims: LatentDims, group: int, queries: int, merged: int = MERGED) -> Any:
    tiling, written = latent_tiling(torch.bfloat16), next_power_of_2(group * queries)
    constants = {
        "GROUPS": 2, "GROUP": group, "RANK": dims.rank, "ROPE": dims.rope, "BLOCK_SIZE": 64, "QUERIES": queries,
        "TILE": tiling.tile, "SEQS": 256, "ROWS": max(written, 16), "WRITTEN": written,
        "PROGRAMS": tiling.programs_per_processor * PROCESSORS, "MERGED": max(merged // (written * dims.rank), 1),
        "PRECISION": "tf32", "STAGES": tiling.num_stages, "SETUP": tiling.setup, "EARLY": True,
    }  # fmt: skip
    return compile_kernel(_latent_kernel, constants, num_warps=tiling.num_warps, launch_pdl=True)


def compile_prefill(dims: LatentDims, num_rows: int, is_last: bool) -> Any:
    tiling = expanded_tiling(torch.bfloat16, num_rows, dims.nope + dims.rope + dims.value, PROCESSORS)
    constants = {
        "NUM_HEADS": 16, "NOPE": dims.nope, "ROPE": dims.rope, "VALUE": dims.value,
        "FIRST": next_power_of_2(dims.nope + 1) // 2, "ROWS": tiling.rows, "KEYS": tiling.keys, "CAUSAL": is_last,
        "CARRIES": True, "PRECISION": "tf32", "STAGES": tiling.num_stages,
    }  # fmt: skip
    return compile_kernel(_expanded_kernel, constants, num_warps=tiling.num_warps)


def compile_rows() -> Any:
    constants = {"NUM_HEADS": 16, "NOPE": 128, "RANK": 512, "HALF": 32, "BLOCK_SIZE": 64, "TILE": 16, "EARLY": True}
    return compile_kernel(_latent_rows_kernel, constants, num_warps=4, launch_pdl=True)


def main(arguments: list[str]) -> None:
    knobs.nvidia.dump_ptxas_log = True
    found = {
        "decode 16": compile_decode(MOONLIGHT, 16, 1), "decode 10": compile_decode(GLM, 10, 1),
        "decode 4": compile_decode(MOONLIGHT, 4, 1, _MERGED_ALONE),
        "rows": compile_rows(),
    }  # fmt: skip
    if arguments:
        found |= {
            "decode 32": compile_decode(MOONLIGHT, 16, 2),
            "decode 20": compile_decode(GLM, 20, 1),
            "decode 256": compile_decode(MISTRAL, 32, 1),
        }
        for name, dims in {"moonlight": MOONLIGHT, "glm": GLM, "mistral": MISTRAL}.items():
            found[f"prefill {name}"] = compile_prefill(dims, MANY_ROWS, True)
            found[f"prefill few {name}"] = compile_prefill(dims, 1, True)
        found["prefill piece"] = compile_prefill(MOONLIGHT, MANY_ROWS, False)
    sizes = {name: kernel.metadata.shared for name, kernel in found.items()}
    json.dump({"shared": sizes, "ptx": {name: kernel.asm["ptx"] for name, kernel in found.items()}}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
