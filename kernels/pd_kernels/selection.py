"""Which implementation of the kernels a device runs.

No other file of this package imports this one, so the imports have no circle.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from pd_kernels.backends import TORCH, Kernels

if TYPE_CHECKING:
    from collections.abc import Callable


def _for_cuda() -> Kernels:
    """Triton's row where Triton is installed. Its import takes seconds and is of no use on a CPU node."""
    if importlib.util.find_spec("triton") is None:
        return TORCH
    from pd_kernels.triton_backend import TRITON, WITHOUT_FLOAT8

    has_float8 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)
    return TRITON if has_float8 else WITHOUT_FLOAT8


BACKENDS: dict[str, Callable[[], Kernels]] = {"cpu": lambda: TORCH, "cuda": _for_cuda}  # by device type


def select_kernels(device: torch.device) -> Kernels:
    """The implementation for a device. Raises ValueError for a device type without one."""
    try:
        make = BACKENDS[device.type]
    except KeyError:
        raise ValueError(f"no kernels for device {device}; there are some for {', '.join(BACKENDS)}") from None
    return make()
