"""`python -m benchmarks memory`: what the KV of a model's layer groups takes, by arithmetic and without a device.

Bytes that a decoding sequence holds and bytes that a handoff moves, by KV group, beside the rule that every group keeps
and moves the whole prompt; and the streams that one GPU has room for at once with default flags.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.shapes import CONFIGS
from pd_cluster.bench.report import report_console
from pd_cluster.config import NodeConfig, SchedulerConfig
from pd_cluster.models.registry import resolve_spec
from pd_cluster.scheduling.sequence_room import decode_blocks
from pd_cluster.worker.capacity import MemoryEstimate, decide_capacity
from pd_connectors.protocol.layout import BlockLayout
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd_cluster.models.spec import ModelSpec
    from pd_connectors.protocol.layout import KVGroup

H200_BYTES = 150.1e9
LENGTHS = (1024, 32_768)  # tokens of a prompt
BLOCK_SIZE = 64
MOST_STREAMS = 1 << 20
# Goals for Gemma 3 27B on one H200: shares of the whole-prompt rule
MOST_HELD, MOST_MOVED, LEAST_STREAMS = 0.2, 0.2, {1024: 0.85, 32_768: 4.0}


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """Of one KV group, for a prompt of some length and the answer's first token."""

    name: str
    whole: int  # all blocks
    held: int  # while it decodes
    moved: int  # by a handoff


def blocks_moved(group: KVGroup, num_tokens: int) -> int:
    """Blocks of a prompt that are handed over."""
    return len(group.handed_over(num_tokens))


def group_bytes(groups: Sequence[KVGroup], num_tokens: int) -> Iterator[GroupBytes]:
    """What each group takes for a prompt of `num_tokens`."""
    for group in groups:
        window = f" of {group.window:,}" if group.window else ""
        yield GroupBytes(
            f"{group.kind.value}{window}, {len(group.layers)} layers",
            -(-(num_tokens + 1) // group.block_size) * group.block_bytes,
            decode_blocks(group, num_tokens + 1) * group.block_bytes,
            blocks_moved(group, num_tokens) * group.block_bytes,
        )


def streams(groups: Sequence[KVGroup], slabs: KvSlabs, num_tokens: int) -> int:
    """Sequences of `num_tokens` that fit at once: one has blocks for its whole prompt, the others decode."""
    held = [decode_blocks(group, num_tokens) for group in groups]
    whole = [-(-num_tokens // group.block_size) for group in groups]

    def slabs_for(count: int) -> int:
        needs = [(count - 1) * one + most for one, most in zip(held, whole, strict=True)]
        return sum(-(-blocks // per_slab) for blocks, per_slab in zip(needs, slabs.per_slab, strict=True))

    return bisect_left(range(MOST_STREAMS), True, key=lambda n: slabs_for(n + 1) > slabs.num_slabs)


def kv_room(spec: ModelSpec, gpu_bytes: float, dtype_bytes: int = 2) -> tuple[float, int]:
    """Bytes for KV on a GPU of `gpu_bytes`, and most sequences, with default flags, as a node estimates them.

    Raises StartupError.
    """
    capacity = decide_capacity(NodeConfig(), spec, dtype_bytes, int(gpu_bytes))
    own_bytes = gpu_bytes * capacity.gpu_memory_utilization
    memory = MemoryEstimate(SchedulerConfig(), spec, dtype_bytes, own_bytes, dtype_bytes)
    return memory.cache_bytes(capacity.max_num_seqs), capacity.max_num_seqs


def room_rows(groups: Sequence[KVGroup], num_bytes: float, max_num_seqs: int) -> Iterator[tuple[int, int, int]]:
    """Of each prompt and the first token of its answer: tokens of the prompt, streams that fit when every group keeps
    whole prompts, and streams that fit."""
    slabs = KvSlabs.in_bytes(BlockLayout(tuple(groups)), num_bytes)
    num_blocks = int(num_bytes // sum(group.block_bytes for group in groups))
    for length in LENGTHS:
        whole = num_blocks // -(-(length + 1) // groups[0].block_size)
        yield length, min(whole, max_num_seqs), min(streams(groups, slabs, length + 1), max_num_seqs)


def byte_rows(groups: Sequence[KVGroup]) -> Iterator[tuple[int, GroupBytes]]:
    """Of each length: what each group takes, and their sum."""
    for length in LENGTHS:
        parts = list(group_bytes(groups, length))
        yield from ((length, part) for part in parts)
        sums = (sum(getattr(part, name) for part in parts) for name in ("whole", "held", "moved"))
        yield length, GroupBytes("all", *sums)


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", allow_abbrev=False, description=__doc__)
    parser.add_argument("--shape", choices=tuple(CONFIGS), default="gemma3-27b", help="Default: gemma3-27b.")
    parser.add_argument("--memory-gb", type=float, default=H200_BYTES / 1e9, metavar="X",
                        help="Memory of the GPU (default: %(default)s, an H200).")  # fmt: skip
    namespace = parser.parse_args(arguments)
    spec = resolve_spec(Path(), CONFIGS[namespace.shape])
    groups = spec.kv_groups(BLOCK_SIZE, "bfloat16")
    num_bytes, max_num_seqs = kv_room(spec, namespace.memory_gb * 1e9)
    table = Table("tokens of a prompt", "KV group", "whole prompt, MB", "held", "share", "handed over", "share",
                  title=f"{namespace.shape}, blocks of {BLOCK_SIZE} tokens")  # fmt: skip
    for length, part in byte_rows(groups):
        table.add_row(f"{length:,}", part.name, f"{part.whole / 1e6:,.0f}",
                      f"{part.held / 1e6:,.0f}", f"{part.held / part.whole:.3f}",
                      f"{part.moved / 1e6:,.0f}", f"{part.moved / part.whole:.3f}")  # fmt: skip
    report_console().print(table)
    title = f"streams at once in {num_bytes / 1e9:.1f} GB of KV, at most {max_num_seqs}"
    rooms = Table("tokens of a prompt", "whole prompts", "streams", "share", title=title)
    for length, before, now in room_rows(groups, num_bytes, max_num_seqs):
        rooms.add_row(f"{length:,}", f"{before}", f"{now}", f"{now / max(1, before):.2f}")
    report_console().print(rooms)
    return 0
