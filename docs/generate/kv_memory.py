"""The tables of `docs/kv_memory.md`: what the KV of Gemma 3 27B takes, and how many streams fit."""

from __future__ import annotations

from pathlib import Path

from benchmarks.memory import BLOCK_SIZE, H200_BYTES, byte_rows, kv_room, room_rows
from benchmarks.shapes import CONFIGS
from docs.generate.document import table
from pd_cluster.models.registry import resolve_spec

DOCUMENT = "docs/kv_memory.md"
_SPEC = resolve_spec(Path(), CONFIGS["gemma3-27b"])
_GROUPS = _SPEC.kv_groups(BLOCK_SIZE, "bfloat16")


def _bytes() -> str:
    rows = [
        [
            f"{length:,}", part.name, f"{part.whole / 1e6:,.0f} MB",
            f"{part.held / 1e6:,.0f} MB", f"{part.moved / 1e6:,.0f} MB", f"{part.held / part.whole:.0%}",
        ]
        for length, part in byte_rows(_GROUPS)
    ]  # fmt: skip
    columns = ("whole prompt", "held in decode", "handed over", "held, of the whole")
    return table(["tokens of a prompt", "KV group", *columns], rows)


def _streams() -> str:
    rows = [
        [f"{length:,}", str(whole), str(now)] for length, whole, now in room_rows(_GROUPS, *kv_room(_SPEC, H200_BYTES))
    ]
    return table(["tokens of a prompt", "streams, if windows kept whole prompts", "streams"], rows)


PARTS = {"kv-bytes": _bytes, "kv-streams": _streams}
