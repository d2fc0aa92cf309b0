"""A step's small arrays, packed into one pinned buffer and moved to the device by one copy.

A step has a dozen of them. Twelve copies from pageable memory take longer than a small model's decode step on the GPU.
The device side is one fixed range of memory, so that a CUDA graph can read its inputs where it was captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_ALIGNMENT = 16  # bytes; torch views and vectorised loads need at least 8
_NUM_BUFFERS = 3  # one is filled while two steps under way read theirs
_DTYPES: dict[type, torch.dtype] = {
    np.int64: torch.int64,
    np.int32: torch.int32,
    np.float32: torch.float32,
    np.float64: torch.float64,
    np.bool_: torch.bool,
}


@dataclass(slots=True)
class _Buffer:
    """One step's host side."""

    pinned: torch.Tensor  # uint8
    array: npt.NDArray[np.uint8]  # the same memory
    copied: torch.cuda.Event  # happens when the copy out of `pinned` has ended


class HostBuffer:
    """Moves a step's arrays to the device: `begin`, any number of `move`s, `flush`. On a CPU it copies nothing.

    Tensors that `move` returned may be read on the device from `flush` to the next step's `flush`, in stream order.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._used = self._flushed = 0
        self._buffers: list[_Buffer] = []
        if device.type == "cuda":
            self._target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            for _ in range(_NUM_BUFFERS):
                pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
                self._buffers.append(_Buffer(pinned, pinned.numpy(), torch.cuda.Event()))  # type: ignore[no-untyped-call]
        else:
            self._target = torch.zeros(num_bytes, dtype=torch.uint8)
            self._array: npt.NDArray[np.uint8] = self._target.numpy()

    def begin(self) -> None:
        """Start to pack the arrays of a step."""
        self._used = self._flushed = 0
        if self._buffers:
            self._buffers.append(self._buffers.pop(0))
            self._buffers[-1].copied.synchronize()  # recorded three steps ago, so this does not wait

    def move(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """Pack an array. Returns its tensor on the device, which has the values after `flush`."""
        if not self._buffers:
            return torch.from_numpy(array)
        start, size = self._used, array.nbytes
        if start + size > self._num_bytes:  # for instance very many sampling settings
            return torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True)
        self._buffers[-1].array[start : start + size] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._used = start + _aligned(size)
        dtype = _DTYPES[array.dtype.type]
        return self._target[start : start + size].view(dtype).view(array.shape)

    def move_rows(self, rows: Sequence[npt.NDArray[np.generic]]) -> torch.Tensor:
        """`move` for the array of equal `rows` (at least one), without a copy that joins them."""
        start, row_bytes = self._used, rows[0].nbytes
        if not self._buffers or start + row_bytes * len(rows) > self._num_bytes:
            return self.move(np.stack(rows))
        end = start + row_bytes * len(rows)
        packed = self._buffers[-1].array[start:end].view(rows[0].dtype).reshape(len(rows), *rows[0].shape)
        for at, row in enumerate(rows):
            packed[at] = row
        self._used = _aligned(end)
        return self._target[start:end].view(_DTYPES[rows[0].dtype.type]).view(packed.shape)

    def flush(self) -> None:
        """Copy to the device all arrays that were packed since `begin` or the last flush."""
        start, end = self._flushed, min(self._used, self._num_bytes)
        if self._buffers and end > start:
            buffer = self._buffers[-1]
            self._target[start:end].copy_(buffer.pinned[start:end], non_blocking=True)
            buffer.copied.record()
        self._flushed = end

    def take_first(self, length: int) -> npt.NDArray[np.int64]:
        """The step's first array, int64 [length], zeroed, in host memory. `flush` copies it to `first(length)`."""
        assert not self._used
        num_bytes = 8 * length
        assert num_bytes <= self._num_bytes
        self._used = _aligned(num_bytes)
        array = self._buffers[-1].array if self._buffers else self._array
        fields = array[:num_bytes].view(np.int64)
        fields.fill(0)
        return fields

    def first(self, length: int) -> torch.Tensor:
        """The tensor on the device for `take_first`. Its address is the same in every step."""
        return self._target[: 8 * length].view(torch.int64)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
