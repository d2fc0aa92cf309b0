"""The tensors of a safetensors file in memory. Imports no torch.

Stricter than a reader of checkpoints: the file may come from anyone, so nothing in it may be passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pd_cluster.adapters.strict_json import described, strict_object
from pd_cluster.errors import BadAdapter

if TYPE_CHECKING:
    from pathlib import Path

MAX_HEADER_BYTES = 4 << 20  # 16,384 tensors of 256 bytes each
MAX_TENSORS = 16_384  # Llama 405B with an adapter everywhere has 1,764
MAX_NAME_CHARS = 512
MAX_DIMS = 8
DTYPES = {"F16": 2, "BF16": 2, "F32": 4}  # as safetensors calls them -> bytes


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A tensor of the file: where its bytes are. Those that have a place in a model are matrices."""

    name: str
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    start: int  # in the file
    num_bytes: int


@described
class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the header tells of a tensor."""

    dtype: Literal["F16", "BF16", "F32"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1, max_length=MAX_DIMS)]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], int]


def read_table(weights: memoryview | bytearray, file: Path) -> dict[str, StoredMatrix]:
    """The tensors by name. `file`: for messages. Raises BadAdapter."""
    size = int.from_bytes(weights[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise BadAdapter(f"{file} is not a safetensors file, or its header is above {MAX_HEADER_BYTES} bytes")
    if len(weights) < 8 + size:
        raise BadAdapter(f"{file} is cut: it has {len(weights)} bytes, and its header alone needs {8 + size}")
    header = strict_object(weights[8 : 8 + size], file)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise BadAdapter(f"{file} has {len(header)} tensors, and {MAX_TENSORS} are allowed")
    if (longest := max(map(len, header), default=0)) > MAX_NAME_CHARS:
        raise BadAdapter(f"{file}: a tensor's name has {longest} characters, and {MAX_NAME_CHARS} are allowed")
    tensors = [_matrix(name, entry, 8 + size, file) for name, entry in header.items()]
    _check_tiles(tensors, 8 + size, len(weights), file)
    return {tensor.name: tensor for tensor in tensors}


def _matrix(name: str, entry: Any, base: int, file: Path) -> StoredMatrix:
    try:
        found = msgspec.convert(entry, _Entry)
    except (ValueError, OverflowError) as error:
        raise BadAdapter(f"{file}: its header does not describe {name}: {error}") from error
    if 0 in found.shape:
        raise BadAdapter(f"{file}: {name} is empty, as in files that DeepSpeed's ZeRO-3 did not gather")
    (start, end), num_bytes = found.data_offsets, prod(found.shape) * DTYPES[found.dtype]
    if end - start != num_bytes:
        raise BadAdapter(f"{file}: {name} has {end - start} bytes, and its shape needs {num_bytes}")
    return StoredMatrix(name, found.dtype, found.shape, base + start, num_bytes)


def _check_tiles(tensors: list[StoredMatrix], start: int, end: int, file: Path) -> None:
    """Raises BadAdapter unless the tensors follow one another from `start` to `end`: no hole, no overlap."""
    for tensor in sorted(tensors, key=lambda one: one.start):
        if tensor.start != start:
            raise BadAdapter(
                f"{file}: {tensor.name} begins at byte {tensor.start}, and what is before it ends at {start}"
            )
        start += tensor.num_bytes
    if start > end:
        raise BadAdapter(f"{file} is cut: it has {end} of its {start} bytes")
    if start < end:
        raise BadAdapter(f"{file} has {end - start} bytes that belong to no tensor")
