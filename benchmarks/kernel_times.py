"""The kernels of a decode step and their times, by torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

STEPS = 16
SHOWN = 15
_NAME_WIDTH = 90


@dataclass(frozen=True, slots=True)
class KernelInStep:
    """A kernel in a step."""

    name: str
    calls: float
    us: float  # of all calls


def profile_steps(generate: Callable[[int], object]) -> str:
    """The table of the kernels of a step. `generate` computes so many tokens for each of its sequences.

    A step's times are those of STEPS + 1 tokens less those of one token, which includes the prompts' last blocks. The
    sum is more than the step takes: a kernel that is launched early waits within its time for the one before it.
    """
    short, long = (_profiled(generate, count) for count in (1, STEPS + 1))
    return text_of(mean_step(short, long, STEPS))


def mean_step(short: Iterable[KernelInStep], long: Iterable[KernelInStep], num_steps: int) -> list[KernelInStep]:
    """The kernels of one of the `num_steps` steps that only the `long` run has, the longest first."""
    calls, times = defaultdict[str, float](float), defaultdict[str, float](float)
    for sign, kernels in ((-1, short), (1, long)):
        for kernel in kernels:
            calls[kernel.name] += sign * kernel.calls
            times[kernel.name] += sign * kernel.us
    found = [KernelInStep(name, calls[name] / num_steps, us / num_steps) for name, us in times.items()]
    return sorted((kernel for kernel in found if kernel.calls > 0), key=lambda kernel: -kernel.us)


def text_of(kernels: list[KernelInStep]) -> str:
    """A line for each of the longest SHOWN kernels, and one for their sum with the others."""
    total = sum(kernel.us for kernel in kernels) or 1.0
    lines = [
        f"{kernel.us:9.1f} us {kernel.us / total:5.1%} {kernel.calls:6.1f} x  {kernel.name[:_NAME_WIDTH]}"
        for kernel in kernels[:SHOWN]
    ]
    return "\n".join([*lines, f"{total:9.1f} us in {len(kernels)} kernels\n"])


def _profiled(generate: Callable[[int], object], num_tokens: int) -> list[KernelInStep]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate(num_tokens)
    return [
        KernelInStep(event.key, event.count, event.self_device_time_total)
        for event in profiler.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    ]
