"""A digest that must be equal on two nodes before one may compute with the other's KV."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from pd_cluster.models.weights import read_header, weight_files

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.models.spec import ModelSpec

LAYOUT_VERSION = "block-first-1"  # [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], RoPE applied to K
SAMPLES_PER_TENSOR = 16
SAMPLE_BYTES = 4096


def fingerprint(spec: ModelSpec, weights: Path | str) -> str:
    """Hex digest of the model's meaning, its weights and the KV layout.

    `weights`: the model directory, or for dummy weights a text that determines them ("dummy seed=0 cpu float32").

    Weights are identified by content: the name, dtype and shape of every tensor and 16 evenly spaced pieces of 4 KiB,
    including the first and last bytes (small tensors whole). That is 64 KiB a tensor and 18 MiB for an 8B model: a
    fraction of a second, where hashing all bytes takes half a minute. Training, merging an adapter and converting
    change bytes everywhere, so they change the sample; an edit of a few bytes between the pieces does not. The
    distribution of tensors over files does not matter. Raises StartupError when the files cannot be read.
    """
    digest = blake2b(digest_size=16, person=b"pd-kv-model")
    meaning: dict[str, Any] = {"layout": LAYOUT_VERSION, "spec": spec.semantic()}
    digest.update(json.dumps(meaning, sort_keys=True).encode())
    if isinstance(weights, str):
        digest.update(weights.encode())
    else:
        for part in _tensor_digests(weights):
            digest.update(part)
    return digest.hexdigest()


def _tensor_digests(directory: Path) -> list[bytes]:
    """One digest per tensor, sorted by the tensors' names."""
    found: dict[str, bytes] = {}
    for file in weight_files(directory):
        header = read_header(file)
        with file.open("rb") as stream:
            base = 8 + int.from_bytes(stream.read(8), "little")
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                digest = blake2b(f"{name} {entry['dtype']} {entry['shape']} ".encode(), digest_size=16)
                for offset in sample_offsets(end - start):
                    stream.seek(base + start + offset)
                    digest.update(stream.read(min(SAMPLE_BYTES, end - start - offset)))
                found[name] = digest.digest()
    return [found[name] for name in sorted(found)]


def sample_offsets(num_bytes: int) -> list[int]:
    """Offsets of the pieces of a tensor of `num_bytes`."""
    if num_bytes <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
        return list(range(0, num_bytes, SAMPLE_BYTES))
    last = num_bytes - SAMPLE_BYTES
    return [last * index // (SAMPLES_PER_TENSOR - 1) for index in range(SAMPLES_PER_TENSOR)]
