"""Blocks between one group's cache tensor and host memory, on threads beside the step loop's.

out   `gather` runs on the step loop's thread. On a GPU it is queued after the steps that wrote the blocks and before
      any later one; on a CPU it copies at once. Any thread takes the bytes from the copy later.
in    `Inlet` writes blocks that the engine has reserved and no step touches. After `flush` all writes have landed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_connectors.base import CacheDescription


class Gathered:
    """A copy of some cache blocks in host memory."""

    def __init__(self, host: torch.Tensor, landed: torch.cuda.Event | None) -> None:
        self._host = host  # [n, *group.rank_shape]
        self._landed = landed

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._landed is not None:
            self._landed.synchronize()

    def block(self, index: int, heads: slice) -> memoryview:
        """The bytes of some heads of one block. Call `wait` first."""
        return self._host[index][heads].reshape(-1).view(torch.uint8).numpy().data


class BlockStaging:
    """Copies blocks out of the cache, for the step loop."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._cache = tensor
        self._stream = _stream_for(tensor)
        self._last: Gathered | None = None

    def gather(self, block_ids: Sequence[int]) -> Gathered:
        """Copy blocks. No step that is on the device at this call writes them; later steps may."""
        ids = torch.tensor(block_ids, dtype=torch.int64).to(self._cache.device, non_blocking=True)  # waits for no step
        blocks = self._cache.index_select(0, ids)
        if self._stream is None:
            return Gathered(blocks, None)
        host = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(self._stream):
            host.copy_(blocks, non_blocking=True)
        blocks.record_stream(self._stream)
        self._last = Gathered(host, self._stream.record_event())
        return self._last

    def settle(self) -> None:
        """Wait until every copy so far is complete.

        After that a writer outside the order of the GPU's streams may write the copied blocks.
        """
        if self._last is not None:
            self._last.wait()
            self._last = None


class Inlet:
    """Writes blocks into the cache, for one loading thread."""

    def __init__(self, cache: CacheDescription) -> None:
        self._tensors = cache.tensors
        self._stream = _stream_for(cache.tensors[0])

    def write(self, group: int, heads: slice, block_id: int, block: memoryview) -> None:
        """Set some heads of a block to these bytes."""
        target = self._tensors[group][block_id][heads]
        source = torch.frombuffer(block, dtype=target.dtype).view(target.shape)
        if self._stream is None:
            target.copy_(source)
        else:
            with torch.cuda.stream(self._stream):
                target.copy_(source)  # pageable memory: the bytes may go when this returns

    def flush(self) -> None:
        """Wait until every write so far has landed."""
        if self._stream is not None:
            self._stream.synchronize()


def _stream_for(tensor: torch.Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(tensor.device) if tensor.is_cuda else None  # type: ignore[no-untyped-call]
