"""`python -m tests.kernels.hopper_prefill {fp8|sinks|}`: the PTX of the prefill kernel for a Hopper GPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from triton import knobs

from pd_kernels.hopper_prefill import HopperPrefill

if TYPE_CHECKING:
    from collections.abc import Collection


def compile_prefill(options: Collection[str]) -> str:
    """What ptxas says (registers, spills) is printed."""
    knobs.nvidia.dump_ptxas_log = True
    fp8, has_sinks = "fp8" in options, "sinks" in options
    group, size = (8, 64) if has_sinks else (4, 128)  # gpt-oss's, and those of Llama 8B
    prefill = HopperPrefill(8, group, size, 64, torch.bfloat16, has_fp8_cache=fp8, has_sinks=has_sinks)
    return str(prefill.compile().asm["ptx"])


if __name__ == "__main__":
    sys.stdout.write(compile_prefill(sys.argv[1:]))
