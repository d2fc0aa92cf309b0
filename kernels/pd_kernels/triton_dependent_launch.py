# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Programmatic dependent launch: a kernel is set up while the ones before it still run. Within CUDA graphs too.

An early kernel calls `others_may_start` first of all, and `wait_for_others` in every program before it reads what
another early kernel may have written, and before it writes anything. So a kernel that has ended implies that all
before it have. What it reads before it waits must be older than the last ordinary launch: weights, and what is set up
once a step, for every step looks up its tokens' embeddings by an ordinary one.
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
    """Let the next kernel's programs in as soon as all of this one's run."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_others(EARLY: tl.constexpr):
    """Until the kernels before this one have ended and their writes are seen. At once the second time."""
    if EARLY:
        gdc_wait()


@cache
def launches_early(device: torch.device) -> bool:
    """Whether a device can: GPUs from Hopper on. Asked at every launch, and torch takes microseconds to say."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early_options(early: bool) -> dict[str, bool]:
    """Options of the launch."""
    return {"launch_pdl": True} if early else {}
