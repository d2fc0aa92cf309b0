"""The safetensors files of a checkpoint: which there are, and their headers. Imports no torch."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError
from pd_cluster.models.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
LFS_HEAD = b"version https://git-lfs.github.com/spec/"


def weight_files(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files, sorted. Raises StartupError when there are none or one is missing."""
    if (directory / INDEX).exists():
        files = [directory / name for name in shards_of_index(directory / INDEX)]
    elif not (directory / SINGLE).exists() and (shards := complete_shards([path.name for path in directory.iterdir()])):
        files = [directory / name for name in shards]
    else:
        files = [directory / SINGLE]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise StartupError(f"{directory} has no {some(absent)} (weights are read from safetensors files only)")
    return files


def shards_of_index(index: Path) -> list[str]:
    """The files that an index names. Raises StartupError."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise StartupError(f"{index} has no weight_map")
    return sorted(set(weight_map.values()))


def complete_shards(names: Collection[str]) -> list[str]:
    """The shards model-00001-of-0000N.safetensors, if all N are there. Each says itself which tensors it has."""
    found = sorted(name for name in names if _SHARD.fullmatch(name))
    parts = [_SHARD.fullmatch(name) for name in found]
    numbers = [(int(part[1]), int(part[2])) for part in parts if part]
    return found if numbers == [(number, len(found)) for number in range(1, len(found) + 1)] else []


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """The length of a safetensors file's header, and name -> {dtype, shape, data_offsets (from the header's end on)}.

    Raises StartupError for a file that is not whole, and for a header of another form.
    """
    check_content(file)
    try:
        with file.open("rb") as stream:
            size, num_bytes = int.from_bytes(stream.read(8), "little"), file.stat().st_size
            if size > min(_MAX_HEADER_BYTES, num_bytes):
                raise StartupError(f"{file} is not a safetensors file, or only a part of one: download it again")
            header: dict[str, Any] = json.loads(stream.read(size))
    except OSError as error:
        raise StartupError(f"cannot read {file}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{file} is not a safetensors file: {error}") from error
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    if not isinstance(header, dict) or not all(map(_is_entry, header.values())):
        raise StartupError(f"{file} is not a safetensors file: its header does not describe tensors")
    needed = 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if num_bytes < needed:
        raise StartupError(f"{file} has only {num_bytes} of its {needed} bytes: download it again")
    return 8 + size, header


def check_content(file: Path) -> None:
    """Raises StartupError for a file that cannot be read, or that only points to its content."""
    try:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(LFS_HEAD)) == LFS_HEAD
    except OSError as error:
        raise StartupError(f"cannot read {file}: {error.strerror}") from error
    if is_pointer:
        raise StartupError(
            f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull` in {file.parent}, or download the "
            "model again"
        )


def some(names: Collection[str], limit: int = 5) -> str:
    """The first names, and the number of the others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def _is_entry(entry: object) -> bool:
    """Whether an entry of a header has a dtype, a shape and a range of bytes."""
    match entry:
        case {"dtype": str(), "shape": list(), "data_offsets": [int(start), int(end)]}:
            return 0 <= start <= end
    return False
