"""The paged KV cache: one memory, with a tensor over it for each group of layers, the block as first dimension.

A pool of the same blocks in host memory takes the blocks of preempted sequences, and cached blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_cluster.scheduling.sequence_room import LEAST_HOST_UNITS, host_unit
from pd_cluster.worker.host_memory import HostMemory
from pd_cluster.worker.plain_memory import plain_memory
from pd_connectors.base import CacheDescription
from pd_connectors.protocol.layout import KVKind
from pd_connectors.protocol.slabs import KvSlabs
from pd_kernels.fp8_cache import FP8, indexable
from pd_kernels.values import KeysValues

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pd_cluster.config import CacheConfig
    from pd_cluster.models.mixer import LayerCache
    from pd_cluster.scheduling.batch import BlockCopies
    from pd_connectors.protocol.layout import BlockLayout
    from pd_kernels.backends import Kernels

    StateViews = Callable[[torch.Tensor], Mapping[int, LayerCache]]  # by layer, of a STATE group's blocks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, "float8_e4m3fn": FP8}
MIN_BLOCKS = 2  # the first step copies a block
_NUM_PADDING_BLOCKS = 1


@dataclass(frozen=True, slots=True)
class KVCache:
    """The memory of the cache, and the tensors in it.

    The engine decides which sequence owns which block. Blocks of different groups lie in the same memory: a slab has
    blocks of one group at a time (`KvSlabs`).
    """

    layout: BlockLayout
    slabs: KvSlabs
    memory: torch.Tensor  # uint8 [n]: the slabs, and after them room for a block of padding
    tensors: tuple[torch.Tensor, ...]  # by group: [num_blocks + padding, *group.rank_shape(tp_size)], views of `memory`
    host: HostMemory
    layer_caches: Mapping[int, LayerCache]  # by layer; layers of no group are absent

    @classmethod
    def allocate(
        cls, layout: BlockLayout, slabs: KvSlabs, num_host_blocks: int, device: torch.device, num_later: int = 0,
        states: StateViews | None = None,
    ) -> KVCache:  # fmt: skip
        """Allocate the cache of a rank, zeroed. Raises StartupError when memory is short.

        num_later: further host blocks, which are not ready. states: the views into the blocks of a STATE group.

        Attention multiplies the value of a masked slot by 0, and 0 times uninitialized memory may be NaN.
        """
        padding = _NUM_PADDING_BLOCKS * max(map(slabs.stride, range(len(layout.groups))))
        shapes = [group.rank_shape(layout.tp_size) for group in layout.groups]
        dtypes = [KV_DTYPES[group.dtype] for group in layout.groups]
        try:
            with plain_memory(device):
                memory = torch.zeros(slabs.num_bytes + padding, dtype=torch.uint8, device=device)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise StartupError(f"cannot allocate {slabs.num_bytes / 1e9:.2f} GB of KV cache: {error}") from error
        unit = host_unit(layout.groups, slabs.per_slab)
        host = HostMemory(shapes, dtypes, num_host_blocks + num_later, device, per_unit=unit)
        host.fill(num_host_blocks)
        tensors = tuple(
            _blocks(memory, slabs.num_blocks(index) + _NUM_PADDING_BLOCKS, slabs.stride(index), shape, dtype)
            for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        )
        caches: dict[int, LayerCache] = {
            layer: view_of_layer(group.kind, tensor, place)
            for group, tensor in zip(layout.groups, tensors, strict=True)
            for place, layer in enumerate(() if group.kind is KVKind.STATE else group.layers)
        }
        if states is not None:
            caches |= states(tensors[-1])
        return cls(layout, slabs, memory, tensors, host, caches)

    @property
    def hosts(self) -> tuple[torch.Tensor, ...]:
        """By group: [num_host_blocks, as in `tensors`], pinned when the cache is on a GPU."""
        return self.host.tensors

    def padding_block(self, group: int) -> int:
        """The id of the block that padding writes to, after all slabs. No sequence owns it, and it is never read."""
        return self.slabs.num_blocks(group)

    def describe(self) -> CacheDescription:
        """Describe the cache for a connector, without the padding blocks."""
        tensors = tuple(tensor[: self.slabs.num_blocks(index)] for index, tensor in enumerate(self.tensors))
        return CacheDescription(tensors, self.layout)

    def run_copies(self, copies: BlockCopies, kernels: Kernels) -> None:
        """Run the copies of a batch before its forward: swap out, then swap in, then copy on write."""
        self.save(copies.swap_out, kernels)
        self.load(copies.swap_in, kernels)
        for part in independent(copies.copy_on_write, self.slabs.per_slab):
            for group, pairs in _by_group(part):
                tensor = self.tensors[group]
                kernels.copy_blocks(tensor, tensor, torch.tensor(pairs, dtype=torch.int64))

    def save(self, copies: Sequence[tuple[int, int, int]], kernels: Kernels) -> None:
        """Copy blocks (group, device, host) to host memory."""
        _copy(copies, self.tensors, self.hosts, kernels)

    def load(self, copies: Sequence[tuple[int, int, int]], kernels: Kernels) -> None:
        """Copy blocks (group, host, device) from host memory."""
        _copy(copies, self.hosts, self.tensors, kernels)

    def clear(self, blocks: Sequence[torch.Tensor | None]) -> None:
        """Zero blocks (int64 [n] by group, without states) before they are filled in part: no read may depend on their
        old content."""
        for tensor, fresh in zip(self.tensors, blocks, strict=False):
            if fresh is not None:
                indexable(tensor).index_fill_(0, fresh, 0)


def view_of_layer(kind: KVKind, blocks: torch.Tensor, place: int) -> KeysValues | torch.Tensor:
    """What a group's `blocks` have for its layer number `place`: rows of latents, or keys and values."""
    if kind is KVKind.LATENT:
        return blocks[:, 0, place]
    return KeysValues(blocks[:, :, place, 0], blocks[:, :, place, 1])


def _copy(
    copies: Sequence[tuple[int, int, int]],
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    kernels: Kernels,
) -> None:
    for group, pairs in _by_group(copies):
        kernels.copy_blocks(sources[group], targets[group], torch.tensor(pairs, dtype=torch.int64))


def _blocks(
    memory: torch.Tensor, num_blocks: int, stride: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """View `memory` as [num_blocks, *shape]: each block contiguous, `stride` bytes from one to the next."""
    inner = torch.empty(shape, device="meta").stride()
    typed = memory[: num_blocks * stride].view(dtype)
    return typed.as_strided((num_blocks, *shape), (stride // dtype.itemsize, *inner))


def _by_group(copies: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """The pairs (from, to) of each group that has some."""
    for group in sorted({group for group, _, _ in copies}):
        yield group, [(source, target) for own, source, target in copies if own == group]


def independent(copies: Iterable[tuple[int, int, int]], per_slab: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Cut copies (group, from, to) within the cache into parts. A part's copies may run in any order, the parts run in
    order.

    A launch copies its pairs in any order. If a block was copied on write, and its last holder is preempted in the same
    step, it may be the target of the step's next copy, or its slab may be another group's.
    """
    parts: list[list[tuple[int, int, int]]] = []
    read: set[tuple[int, int]] = set()
    written: set[tuple[int, int]] = set()
    for group, source, target in copies:
        from_own, from_foreign = _places(group, source, per_slab)
        to_own, to_foreign = _places(group, target, per_slab)
        if not parts or not written.isdisjoint(from_foreign | to_foreign) or not read.isdisjoint(to_foreign):
            parts.append([])
            read, written = set(), set()
        parts[-1].append((group, source, target))
        read |= from_own
        written |= to_own
    return parts


def _places(group: int, block: int, per_slab: Sequence[int]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """The marks of a block: itself, and its slab. And the marks that conflict with it.

    A block conflicts with itself, and with any block of another group in the same slab.
    """
    slab = block // per_slab[group]
    others = {(-1 - other, slab) for other in range(len(per_slab)) if other != group}
    return {(group, block), (-1 - group, slab)}, {(group, block), *others}


def host_blocks_in(num_bytes: float, layout: BlockLayout, slabs: KvSlabs) -> int:
    """The units of host memory of which one rank's parts fit into `num_bytes`: see `host_unit`."""
    unit = host_unit(layout.groups, slabs.per_slab)
    sizes = (group.rank_bytes(layout.tp_size) for group in layout.groups)
    return int(num_bytes // sum(count * size for count, size in zip(unit, sizes, strict=True)))


def host_units(config: CacheConfig, layout: BlockLayout, slabs: KvSlabs) -> tuple[int, int]:
    """The units of host memory for swapped sequences, and further ones. Raises StartupError if one does nothing."""
    swap, host = (host_blocks_in(gb * 1e9, layout, slabs) for gb in (config.swap_gb, config.host_gb))
    settings = (
        ("--swap-gb", config.swap_gb, swap, 1),
        ("--host-cache-gb", config.host_cache_gb, host, LEAST_HOST_UNITS),
    )
    for flag, gb, num, least in settings:
        if gb and num < least:
            unit = zip(host_unit(layout.groups, slabs.per_slab), layout.groups, strict=True)
            num_bytes = least * sum(count * group.rank_bytes(layout.tp_size) for count, group in unit)
            what = (
                "a state and twice its bytes of keys and values"
                if layout.groups[-1].kind is KVKind.STATE
                else "a block"
            )
            raise StartupError(
                f"{flag} {gb:g}: so little holds nothing; {what}, {least} of each, take {num_bytes / 1e6:.1f} MB: give "
                f"at least {ceil(num_bytes / 1e6) / 1e3:g}, or 0"
            )
    return swap, host - swap


def make_slabs(layout: BlockLayout, num_blocks: int, free_bytes: Callable[[], int]) -> KvSlabs:
    """The slabs for `num_blocks` blocks, or with 0 those that fit. Raises StartupError if they are too few."""
    slabs = KvSlabs.of_blocks(layout, num_blocks) if num_blocks else KvSlabs.in_bytes(layout, free_bytes())
    groups = range(len(layout.groups))
    has_states = layout.groups[-1].kind is KVKind.STATE
    least = 1 if len(groups) == 1 else len(groups) + 1  # a slab for each, and one that moves
    if slabs.num_slabs < least or min(map(slabs.num_blocks, groups)) < MIN_BLOCKS:
        size_mb, count = layout.block_bytes / 1e6, slabs.num_bytes // layout.rank_bytes
        if has_states:
            need_mb = least * slabs.slab_bytes / 1e6
            raise StartupError(
                f"the KV cache has {slabs.num_bytes / 1e6:.1f} MB; two states of a sequence and a block of its keys "
                f"and values take {need_mb:.1f} MB: give it more memory"
            )
        raise StartupError(f"the KV cache has room for {count} blocks of {size_mb:.1f} MB; give it more memory")
    return slabs


def describe_slabs(slabs: KvSlabs, layout: BlockLayout) -> str:
    """The line of the start about the cache."""
    dtype = layout.groups[0].dtype
    if len(layout.groups) == 1:
        return f"cache {slabs.num_blocks(0)} blocks of {layout.block_size} tokens in {dtype}"
    parts = [
        f"{count} blocks of {group.block_size} tokens ({group.kind}{f' {group.window}' if group.window else ''})"
        for group, count in zip(layout.groups, slabs.per_slab, strict=True)
    ]
    size_mb = slabs.slab_bytes / 1e6
    return f"cache {slabs.num_slabs} slabs of {size_mb:.1f} MB in {dtype}, each {' or '.join(parts)}"
