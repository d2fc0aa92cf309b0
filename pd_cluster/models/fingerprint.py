"""What must be equal on two nodes before one may compute on the other's KV."""

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

    `weights`: the model directory, or for dummy weights a word that determines them ("dummy seed=0 cpu float32").

    Weights are known by content, not by name: of every tensor its name, dtype, shape and 16 evenly spaced pieces of
    4 KiB, the first and last bytes among them (small tensors whole). That is 64 KiB a tensor, 18 MiB for an 8B model:
    a fraction of a second where hashing everything takes half a minute. Training, merging an adapter or converting
    changes bytes everywhere, so the sample sees it; a hand-made edit of a few bytes in between it would not. How the
    tensors are spread over files does not matter. Raises StartupError when the files cannot be read.
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
    """One digest per tensor, in order of name."""
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
    """Where the pieces of a tensor of `num_bytes` begin."""
    if num_bytes <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
        return list(range(0, num_bytes, SAMPLE_BYTES))
    last = num_bytes - SAMPLE_BYTES
    return [last * index // (SAMPLES_PER_TENSOR - 1) for index in range(SAMPLES_PER_TENSOR)]
