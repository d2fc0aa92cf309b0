"""Memory of a GPU that other processes can read at full speed, whatever torch's allocator is set to."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pd_connectors.nixl.gpu_memory import is_readable, open_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PROBE_BYTES = 32 << 20  # torch takes 20 MB at once for smaller ones, to share
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first one counts, as in torch


@contextmanager
def plain_memory(device: torch.device) -> Iterator[None]:
    """During the block torch allocates large tensors on `device` by cudaMalloc, each in memory of its own.

    Its expandable segments are put aside for as long: see pd_connectors.nixl.gpu_memory.
    """
    if device.type != "cuda" or is_plain(device):
        yield
        return
    with without_segments(_set_allocator, os.environ):
        yield


def is_plain(device: torch.device) -> bool:
    """Whether other processes can read what torch allocates on this GPU now: the driver says so of a tensor.

    Of one with a segment of its own: a smaller one may come from a segment of before.
    """
    return is_readable(torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device).data_ptr(), open_driver())


@contextmanager
def without_segments(set_allocator: Callable[[str], None], environ: Mapping[str, str]) -> Iterator[None]:
    """Set torch's allocator for the block, then to what the environment says again."""
    given = next((environ[name] for name in _VARIABLES if environ.get(name)), "expandable_segments:True")
    settings = [item for item in given.split(",") if not item.strip().startswith("expandable_segments")]
    set_allocator(",".join([*settings, "expandable_segments:False"]))
    try:
        yield
    finally:
        set_allocator(given)


def _set_allocator(settings: str) -> None:
    torch_c: Any = torch._C  # the public name of torch 2.11 is deprecated in 2.13, and calls this one
    torch_c._accelerator_setAllocatorSettings(settings)
