"""Prefill chunks by flashinfer's FlashAttention-3 kernel for Hopper GPUs, over the paged cache in its own layout.

The compiled module is called without flashinfer's wrapper class. The class copies data that this kernel never reads,
and its plan reuses one pinned buffer while the copy of the previous plan may still wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pd_kernels.triton_decode import num_processors

if TYPE_CHECKING:
    from pd_kernels.prefill_choice import AttentionShape
    from pd_kernels.values import PackedSequences

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
_NUM_WORK_ARRAYS = 7  # of the schedule: int32, one entry per tile of query rows and head
_ALIGNMENT = 16
_CAUSAL, _HEADS_FIRST = 1, 1  # flashinfer's MaskMode and TensorLayout


@dataclass(frozen=True, slots=True)
class FlashPrefill:
    """The kernel for one shape."""

    module: Any
    shape: AttentionShape
    scratch: torch.Tensor  # uint8, for arguments that this kernel ignores

    @classmethod
    def load(cls, shape: AttentionShape, compiles: bool) -> FlashPrefill:
        """Takes seconds. With `compiles`, a shape without a library is compiled, which takes minutes, nvcc and ninja.

        Raises ValueError for an unsupported shape, ImportError without flashinfer, RuntimeError when
        the library is missing or cannot be compiled; flashinfer may raise other errors.
        """
        if shape.device.type != "cuda" or torch.cuda.get_device_capability(shape.device) != (9, 0):
            raise ValueError("flashinfer's kernel needs a Hopper GPU")
        if shape.dtype not in DTYPES or shape.head_dim not in HEAD_DIMS:
            raise ValueError(f"flashinfer's kernel does not support {shape.dtype} heads of {shape.head_dim}")
        from flashinfer.jit.attention.modules import gen_batch_prefill_module

        dtype, size = shape.dtype, shape.head_dim
        library = gen_batch_prefill_module("fa3", dtype, dtype, dtype, torch.int32, size, size, 0, False, False, False)
        if not library.is_compiled:
            if not compiles:
                raise RuntimeError(f"flashinfer is installed but not compiled for {dtype} heads of {size}")
            library.build(verbose=False)
        module = library.load(library.get_library_path())
        return cls(module, shape, torch.empty(_ALIGNMENT, dtype=torch.uint8, device=shape.device))

    def num_tiles(self, query_lens: np.ndarray[Any, np.dtype[np.int64]]) -> int:
        """Tiles of query rows times heads: the work units that processors share."""
        rows = 192 if self.shape.head_dim == 64 else 128
        return int((-(-query_lens // rows)).sum()) * self.shape.num_heads

    def plan(self, packed: PackedSequences) -> FlashChunks:
        """Plan for all layers of a step with at least one chunk. Does not read from the device and does not wait."""
        shape, first = self.shape, packed.num_decodes
        query_lens, seq_lens = packed.host_query_lens[first:], packed.host_seq_lens[first:]
        tables = packed.block_tables[first:]
        count = len(query_lens)
        query_starts = np.zeros(count + 1, np.int32)
        np.cumsum(query_lens, out=query_starts[1:])
        # The kernel finds a sequence's blocks at an offset into one array, so rows of the table need no copy
        table_starts = np.arange(count + 1, dtype=np.int32) * tables.stride(0)
        size = _NUM_WORK_ARRAYS * (4 * self.num_tiles(query_lens) + _ALIGNMENT)
        size += 4 * (num_processors(shape.device) + 1) + 2 * _ALIGNMENT
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        schedule = torch.empty(size, dtype=torch.uint8, device=shape.device)
        places = self.module.plan(
            self.scratch, schedule, pinned, *(torch.from_numpy(each) for each in (query_starts, table_starts)),
            torch.from_numpy(seq_lens.astype(np.int32)), int(query_starts[-1]), count, shape.num_heads,
            shape.num_kv_heads, shape.block_size, False, shape.head_dim, shape.head_dim, True, -1,
        )  # fmt: skip
        # Torch reuses pinned memory when its own copies are done. The plan's copy is not torch's: this one follows it
        schedule[-1:].copy_(pinned[-1:], non_blocking=True)
        return FlashChunks(self, first, places, schedule, tables)


@dataclass(frozen=True, slots=True)
class FlashChunks:
    """The chunks of one step."""

    kernel: FlashPrefill
    first: int  # row of the first chunk's first token
    places: Any  # offsets into `schedule`
    schedule: torch.Tensor  # uint8
    tables: torch.Tensor  # int32 [chunks, max_blocks]

    def run(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor, scale: float
    ) -> None:
        """`query`, `out` [T, H, D] of the whole step; one layer's cache views [N, G, B, D]."""
        ignored = self.kernel.scratch
        self.kernel.module.paged_run(
            ignored, self.schedule, self.places, query[self.first :], key_cache, value_cache, ignored, ignored,
            self.tables, ignored, out[self.first :], None, _CAUSAL, _HEADS_FIRST, -1, False, None, None, None, None,
            0.0, scale, 1.0, 0,
        )  # fmt: skip
