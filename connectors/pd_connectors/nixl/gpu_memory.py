"""Whether NIXL can read a GPU's memory from another process at full speed: the driver says so of one pointer.

UCX opens the memory of another process by CUDA's IPC handles, which exist only for what cudaMalloc returned whole.
Memory that is mapped piece by piece (torch's expandable segments, memory pools) it copies through the host: 0.5 GB/s
instead of 388 on an H200.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from pd_connectors.protocol.errors import ConnectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

IS_LEGACY_CUDA_IPC_CAPABLE = 10  # of the driver's CUpointer_attribute
CAUSE = "it is mapped piece by piece, as by expandable_segments:True in $PYTORCH_ALLOC_CONF or $PYTORCH_CUDA_ALLOC_CONF"


def open_driver() -> Any:
    """CUDA's driver as ctypes has it; None: there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def is_readable(pointer: int, driver: Any) -> bool:
    """Whether other processes can open the memory at `pointer`, on a GPU. A driver that does not know it: yes."""
    if driver is None:
        return True
    answer = ctypes.c_uint(0)
    attribute = ctypes.c_int(IS_LEGACY_CUDA_IPC_CAPABLE)
    status = driver.cuPointerGetAttribute(ctypes.byref(answer), attribute, ctypes.c_uint64(pointer))
    return bool(status) or bool(answer.value)


def refuse_mapped(tensors: Iterable[torch.Tensor], driver: Any) -> None:
    """Raise ConnectorUnavailable for a tensor on a GPU that other processes cannot open."""
    pointers = {tensor.data_ptr() for tensor in tensors if tensor.is_cuda}  # groups that share memory begin with it
    if not all(is_readable(pointer, driver) for pointer in pointers):
        raise ConnectorUnavailable(f"NIXL cannot read the KV cache at the GPU's speed: {CAUSE}; unset it")
