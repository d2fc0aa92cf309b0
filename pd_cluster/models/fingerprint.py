"""A digest that must be equal on two nodes before one may compute with the other's KV."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pd_cluster.models.checkpoint_files import read_header, weight_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pd_cluster.models.spec import ModelSpec

LAYOUT_VERSION = "block-first-1"  # [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], RoPE applied to K
PIECE_BYTES = 4096
TENSOR_BYTES = 16 * PIECE_BYTES  # that are read of one tensor, where there are few tensors
TOTAL_BYTES = 48 << 20  # of all tensors; leaves 16 MiB of 64 to the files' headers, which have about 140 bytes a tensor


def fingerprint(spec: ModelSpec, weights: Path | str, rounded: str = "") -> str:
    """Hex digest of the model's meaning, its weights and the KV layout.

    `weights`: the model directory, or for dummy weights a text that determines them ("dummy seed=0 cpu float32").
    `rounded`: the dtypes from and to which the cache rounds KV, with scale 1; "": KV has the weights' dtype.

    Weights are identified by content: the name, dtype and shape of every tensor and 16 evenly spaced pieces of 4 KiB,
    including the first and last bytes (small tensors whole). That is 64 KiB a tensor and 18 MiB for an 8B model: a
    fraction of a second, where hashing all bytes takes half a minute. If the pieces of all tensors are more than 48 MiB
    together, fewer are read of each, see `bytes_per_tensor`: 2 KiB of each of the 18,867 tensors of Qwen3-30B.

    Training, merging an adapter and converting change bytes everywhere in a tensor, so they change the sample, however
    small it is; no tensor is left out, so one expert that differs is seen. An edit of a few bytes between the pieces is
    not seen. The distribution of tensors over files does not matter. Raises StartupError when the files cannot be read.
    """
    digest = blake2b(digest_size=16, person=b"pd-kv-model")
    meaning: dict[str, Any] = {"layout": LAYOUT_VERSION, "spec": spec.semantic()}
    if rounded:
        meaning["kv"] = {"rounded": rounded, "scale": 1.0}
    digest.update(json.dumps(meaning, sort_keys=True).encode())
    if isinstance(weights, str):
        digest.update(weights.encode())
    else:
        for part in _tensor_digests(weights):
            digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Where the bytes of a tensor are, and what its file says of it."""

    file: Path
    offset: int
    num_bytes: int
    meaning: str  # name, dtype and shape


def _tensor_digests(directory: Path) -> list[bytes]:
    """One digest per tensor, sorted by the tensors' names."""
    tensors: dict[str, _StoredTensor] = {}
    for file in weight_files(directory):
        base, header = read_header(file)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            meaning = f"{name} {entry['dtype']} {entry['shape']} "
            tensors[name] = _StoredTensor(file, base + start, end - start, meaning)
    limit = bytes_per_tensor([tensor.num_bytes for tensor in tensors.values()])
    found: dict[str, bytes] = {}
    by_place = sorted(tensors, key=lambda name: (tensors[name].file, tensors[name].offset))
    for file, names in groupby(by_place, key=lambda name: tensors[name].file):
        with file.open("rb", buffering=512) as stream:  # the default would read 8 KiB for a piece of 2 KiB
            for name in names:
                tensor = tensors[name]
                digest = blake2b(tensor.meaning.encode(), digest_size=16)
                for start, length in pieces(tensor.num_bytes, limit):
                    stream.seek(tensor.offset + start)
                    digest.update(stream.read(length))
                found[name] = digest.digest()
    return [found[name] for name in sorted(found)]


def bytes_per_tensor(sizes: Sequence[int]) -> int:
    """How many bytes to read at most of each tensor: 64 KiB, halved until tensors of these `sizes` keep to 48 MiB."""
    limit = TENSOR_BYTES
    while limit > 1 and sum(min(size, limit) for size in sizes) > TOTAL_BYTES:
        limit //= 2
    return limit


def pieces(num_bytes: int, limit: int = TENSOR_BYTES) -> list[tuple[int, int]]:
    """Offset and length of the pieces to read of a tensor of `num_bytes`, at most `limit` bytes together.

    Spaced evenly from the first byte to the last; a single piece is in the middle.
    """
    length = min(PIECE_BYTES, limit)
    if num_bytes <= limit:
        return [(offset, min(length, num_bytes - offset)) for offset in range(0, num_bytes, length)]
    last, count = num_bytes - length, limit // length
    if count == 1:
        return [(last // 2, length)]
    return [(last * index // (count - 1), length) for index in range(count)]
