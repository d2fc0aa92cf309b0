"""Compiles and launches the Gluon kernel that computes large tiles of prefill attention on Hopper GPUs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_source

from pd_kernels.launch_sizes import num_processors

if TYPE_CHECKING:
    from pd_kernels.attention import AttentionShape
    from pd_kernels.values import KeysValues, PackedSequences, PrefillTiling

logger = logging.getLogger(__name__)
_LOG2_E = 1.4426950408889634
_ROWS = 128  # rows of a tile
_PIECE = 64  # rows of a warpgroup; keys and columns of one copy
_MAX_REGISTERS = 168  # of each thread at the start; then the producer warps give most of theirs to the other warps
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class HopperPrefill:
    """The LargeTiles for Hopper GPUs: the Gluon kernel for one shape.

    The compiled kernel is specialized on the fields.
    """

    num_kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    block_size: int
    dtype: torch.dtype
    has_fp8_cache: bool = False
    has_sinks: bool = False

    @classmethod
    def of(cls, shape: AttentionShape) -> HopperPrefill:
        """The kernel for a group that `HopperBackend` does not refuse."""
        return cls(
            shape.num_kv_heads,
            shape.heads_per_kv_head,
            shape.head_dim,
            shape.block_size,
            shape.dtype,
            shape.has_fp8_cache,
            shape.has_sinks,
        )

    def takes(self, query: torch.Tensor, tiling: PrefillTiling) -> bool:
        """Whether the tiles are large and unshared, and the queries aligned for the tensor memory accelerator."""
        is_aligned = (query.stride(0) % 8, query.data_ptr() % 16) == (0, 0)
        return is_aligned and (tiling.rows, tiling.parts) == (_ROWS, 1)

    def compile(self) -> Any:
        """Compile the kernel for a Hopper GPU. The compilation needs no GPU.

        Raises any exception of Triton's compiler, because Gluon differs between versions.
        """
        from triton.experimental.gluon._runtime import GluonASTSource

        from pd_kernels.gluon_prefill import gluon_prefill_kernel as kernel

        element, (layout, pieces) = _TYPES[self.dtype], _layouts(self.has_fp8_cache)
        cached = "fp8e4nv" if self.has_fp8_cache else element
        types = {
            "query_tiles": f"tensordesc<{element}{self._query_block},{layout!r}>",
            **dict.fromkeys(("key_tiles", "value_tiles"), f"tensordesc<{cached}{[1, 1, _PIECE, _PIECE]},{pieces!r}>"),
            "out": f"*{element}",
            "sinks": "*fp32" if self.has_sinks else "constexpr",
            **dict.fromkeys(("block_tables", "query_starts", "seq_lens", "tiles"), "*i32"),
            **dict.fromkeys(("num_tiles", "table_stride"), "i32"),
            "scale": "fp32",
        }
        constants: dict[str, int | None] = dict(zip(kernel.arg_names[-4:], self._constants, strict=True))
        constants |= {} if self.has_sinks else {"sinks": None}
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        aligned = {(kernel.arg_names.index("out"),): [["tt.divisibility", 16]]}
        source = GluonASTSource(kernel, signature, constants, aligned)
        options = {"num_warps": 4, "maxnreg": _MAX_REGISTERS}
        return compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)

    def launch(
        self,
        query: torch.Tensor,
        cache: KeysValues,
        packed: PackedSequences,
        tiles: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """See triton_prefill.prefill_attention. Raises AssertionError for unaligned caches, and for other sinks."""
        assert (None if sinks is None else sinks.dtype) == (torch.float32 if self.has_sinks else None)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        layout, pieces = _layouts(self.has_fp8_cache)
        keys, values = (
            TensorDescriptor(part, list(part.shape), list(part.stride()), [1, 1, _PIECE, _PIECE], pieces)
            for part in cache
        )
        queries = TensorDescriptor(query, list(query.shape), list(query.stride()), self._query_block, layout)
        num_tiles = tiles.shape[1]
        kernel = compiled(self)
        assert kernel is not None, "a group without a compiled kernel is refused"
        num_programs = min(num_tiles * self.num_kv_heads, num_processors(query.device))
        kernel[(num_programs, 1, 1)](
            queries, keys, values, out, sinks, packed.block_tables, packed.query_starts, packed.seq_lens, tiles,
            num_tiles, packed.block_tables.stride(0), scale * _LOG2_E, *self._constants,
        )  # fmt: skip

    @property
    def _query_block(self) -> list[int]:
        return [_PIECE // self.group, self.group, self.head_dim]

    @property
    def _constants(self) -> tuple[int, int, int, int]:
        return self.num_kv_heads, self.group, self.head_dim, self.block_size


@cache
def _layouts(has_fp8_cache: bool) -> tuple[Any, Any]:
    """Layouts of queries, and of keys and values, in shared memory. Cached: Gluon takes 5 us to make one."""
    from triton.experimental.gluon import language as gl

    pieces = gl.NVMMASharedLayout(_PIECE, 8, rank=4) if has_fp8_cache else gl.NVMMASharedLayout(128, 16, rank=4)
    return gl.NVMMASharedLayout(128, 16, rank=3), pieces


@cache
def compiled(prefill: HopperPrefill) -> Any | None:
    """The compiled kernel; None, and a warning, if this version of Triton cannot compile it."""
    try:
        return prefill.compile()
    except Exception:  # a compiler may raise anything
        logger.warning("the prefill kernel for Hopper GPUs does not compile", exc_info=True)
        return None
