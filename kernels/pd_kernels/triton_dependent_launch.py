# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Programmatic dependent launch: a kernel starts while the kernels before it still run, also within CUDA graphs.

An early kernel first calls `others_may_start`. Every program calls `wait_for_others` before it reads data that another
early kernel may have written, and before it writes anything. So when a kernel has ended, all kernels before it have
ended. Data that a program reads before this call must be older than the last ordinary launch: weights, and data that is
set up once a step, because every step then looks up its embeddings with an ordinary launch.

Source: NVIDIA CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def others_may_start(EARLY: tl.constexpr):
    """Let the next kernel's programs start as soon as all programs of this kernel have called this."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_others(EARLY: tl.constexpr):
    """Wait until the kernels before this one have ended and their writes are visible. A second call returns at once."""
    if EARLY:
        gdc_wait()


@cache
def launches_early(device: torch.device) -> bool:
    """Whether the device supports programmatic dependent launch (Hopper and later).

    The answer is cached: every launch asks, and torch takes microseconds.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early_options(early: bool) -> dict[str, bool]:
    """The launch options that start a kernel early, if `early`."""
    return {"launch_pdl": True} if early else {}
