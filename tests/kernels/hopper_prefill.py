"""`python -m tests.kernels.hopper_prefill {fp8|}`: the PTX of the prefill kernel for a Hopper GPU."""

from __future__ import annotations

import sys

import torch

from pd_kernels.hopper_prefill import HopperPrefill


def compile_prefill(fp8: bool) -> str:
    prefill = HopperPrefill(8, group=4, head_dim=128, block_size=64, dtype=torch.bfloat16, has_fp8_cache=fp8)
    return str(prefill.compile().asm["ptx"])


if __name__ == "__main__":
    sys.stdout.write(compile_prefill("fp8" in sys.argv[1:]))
