"""Fingerprints: what they tell apart, what they cost, and that builds agree on them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

import pd_cluster
from benchmarks.shapes import CONFIGS
from pd_cluster.errors import StartupError
from pd_cluster.models.checkpoint_files import read_header
from pd_cluster.models.directory import read_json
from pd_cluster.models.fingerprint import PIECE_BYTES, TENSOR_BYTES, TOTAL_BYTES, bytes_per_tensor, fingerprint, pieces
from pd_cluster.models.registry import resolve_spec

QWEN3_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
GLM4_EXPERTS = {
    "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "use_qk_norm": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SPEC = resolve_spec(Path(), CONFIGS["8b"])
LIMIT = 64 << 20  # bytes that a fingerprint may read
Shapes = dict[str, list[int]]


def dense_8b() -> Shapes:
    """The tensors of Llama 8B, with short names."""
    layer = {
        "q": [4096, 4096], "k": [1024, 4096], "v": [1024, 4096], "o": [4096, 4096], "gate": [14336, 4096],
        "up": [14336, 4096], "down": [4096, 14336], "n1": [4096], "n2": [4096],
    }  # fmt: skip
    shapes = {f"model.layers.{number}.{name}.weight": shape for number in range(32) for name, shape in layer.items()}
    return shapes | {"model.embed_tokens.weight": [128256, 4096], "lm_head.weight": [128256, 4096]}


def qwen3_30b() -> Shapes:
    """The 18,867 tensors of Qwen3-30B-A3B."""
    experts = {
        f"mlp.experts.{number}.{part}_proj": [2048, 768] if part == "down" else [768, 2048]
        for number in range(128)
        for part in ("gate", "up", "down")
    }
    layer = experts | {
        "self_attn.q_proj": [4096, 2048], "self_attn.k_proj": [512, 2048], "self_attn.v_proj": [512, 2048],
        "self_attn.o_proj": [2048, 4096], "self_attn.q_norm": [128], "self_attn.k_norm": [128], "mlp.gate": [128, 2048],
        "input_layernorm": [2048], "post_attention_layernorm": [2048],
    }  # fmt: skip
    shapes = {f"model.layers.{number}.{name}.weight": shape for number in range(48) for name, shape in layer.items()}
    return shapes | {
        "model.embed_tokens.weight": [151936, 2048],
        "lm_head.weight": [151936, 2048],
        "model.norm": [2048],
    }


def write_sparse(directory: Path, shapes: Shapes, num_files: int) -> dict[str, tuple[Path, int, int]]:
    """bfloat16 zeros that occupy no space. Returns each tensor's file, offset and size."""
    places, names = {}, list(shapes)
    files = [directory / f"model-{number}.safetensors" for number in range(num_files)]
    for number, file in enumerate(files):
        header: dict[str, dict[str, Any]] = {}
        end = 0
        for name in names[number::num_files]:
            start, end = end, end + 2 * prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        base = 8 + len(text)
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(base + end)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            places[name] = (file, base + start, stop - start)
    weight_map = {name: file.name for name, (file, _, _) in places.items()}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return places


def bytes_read_by_this_process() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.long
def test_a_large_mixture_of_experts_is_told_apart_by_reading_64_mib(tmp_path: Path) -> None:
    places = write_sparse(tmp_path, qwen3_30b(), 16)
    assert len(places) == 18867
    before = bytes_read_by_this_process()
    original = fingerprint(SPEC, tmp_path)
    assert bytes_read_by_this_process() - before <= LIMIT
    for name in ("model.layers.30.mlp.experts.77.down_proj.weight", "model.layers.0.self_attn.q_norm.weight"):
        file, offset, size = places[name]
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(b"\1" * size)
        changed, original = original, fingerprint(SPEC, tmp_path)
        assert changed != original, f"another {name} is not seen"


@pytest.mark.long
def test_files_of_a_dense_model_have_the_fingerprint_of_earlier_builds(tmp_path: Path) -> None:
    write_sparse(tmp_path, dense_8b(), 3)
    before = bytes_read_by_this_process()
    assert fingerprint(SPEC, tmp_path) == "84e53f4236429085b7b13654e871027d"
    assert bytes_read_by_this_process() - before <= 20 << 20
    demo = Path(pd_cluster.__file__).parent / "demo_model"
    spec = resolve_spec(demo, read_json(demo / "config.json"))
    assert fingerprint(spec, demo) == "0444b9084cf9c531a9223fe961f18823"


@pytest.mark.parametrize(
    ("shape", "changes", "known"),
    [
        ("8b", {}, "fbfd0709abac3582ade0870240a0b945"),
        ("0.6b", {}, "ff6de20d1315a2d976dbdb4f2e3b3e02"),
        ("tiny", {}, "463cedd1ebbf44d07e4472661675a212"),
        ("tiny", {"architectures": ["MistralForCausalLM"], "sliding_window": 24}, "e9a51f20cf9ac0627d8e51556c2829ea"),
        (
            "tiny",
            {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "eb257f617b8714cd1bbbec9675b4d149",
        ),
        ("tiny", {"rope_scaling": LLAMA3}, "a3d9655d8ac8ad7cf4d4fa395ddf175e"),
        (
            "tiny",
            {"architectures": ["Gemma3ForCausalLM"], "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "0a42d72048607dac706825573a2e248b",
        ),
        ("tiny", QWEN3_EXPERTS, "bcaa85cf8654e82a2cbfc5c50f1636cf"),
        ("tiny", GLM4_EXPERTS, "42d17d8183e9b4e3b1ca2f629b340cd0"),
    ],
)
def test_fingerprints_are_those_of_earlier_builds(shape: str, changes: dict[str, Any], known: str) -> None:
    """Else nodes of two builds refuse each other, and a pool forgets all that it holds."""
    assert fingerprint(resolve_spec(Path(), {**CONFIGS[shape], **changes}), "dummy") == known


@pytest.mark.parametrize(
    "header",
    [b"[" * 5000, b"[]", b'{"a": {}}', b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", 4]}}',
     b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-9, 4]}}'],
)  # fmt: skip
def test_headers_of_another_form_are_refused(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(StartupError, match="is not a safetensors file"):
        read_header(file)


def test_a_header_is_not_read_beyond_the_limit_of_the_library(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((1 << 28).to_bytes(8, "little"))
    os.truncate(file, 1 << 29)
    before = bytes_read_by_this_process()
    with pytest.raises(StartupError, match="is not a safetensors file"):
        read_header(file)
    assert bytes_read_by_this_process() - before < 1 << 20


@pytest.mark.parametrize("num_tensors", [1, 768, 769, 18_867, 90_000])
def test_tensors_share_a_budget(num_tensors: int) -> None:
    limit = bytes_per_tensor([1 << 30] * num_tensors)
    assert limit == TENSOR_BYTES or limit * num_tensors <= TOTAL_BYTES < 2 * limit * num_tensors
    assert limit in {TENSOR_BYTES >> power for power in range(17)}
    assert bytes_per_tensor([100] * num_tensors) == TENSOR_BYTES, "small tensors are read whole"


@pytest.mark.parametrize("limit", [TENSOR_BYTES, 2 * PIECE_BYTES, PIECE_BYTES, 512])
@pytest.mark.parametrize("num_bytes", [0, 1, 512, 513, PIECE_BYTES, 5 * PIECE_BYTES + 3, TENSOR_BYTES + 1, 1 << 30])
def test_pieces_are_spread_over_a_tensor_and_keep_to_the_limit(num_bytes: int, limit: int) -> None:
    found = pieces(num_bytes, limit)
    ends = [offset + length for offset, length in found]
    assert sum(length for _, length in found) == min(num_bytes, limit)
    assert found == sorted(set(found))
    assert all(0 <= offset < end <= num_bytes for (offset, _), end in zip(found, ends, strict=True))
    if len(found) > 1:
        assert (found[0][0], ends[-1]) == (0, num_bytes)
    elif num_bytes > limit:
        assert abs(found[0][0] - (num_bytes - ends[-1])) <= 1, "a single piece is in the middle"


def test_packed_experts_of_another_form_are_another_model() -> None:
    """Their numbers were rounded. So is another limit of the activation."""
    config = CONFIGS["gpt-oss-20b"]
    changes: tuple[dict[str, Any], ...] = ({}, {"quantization_config": None}, {"swiglu_limit": 6.0})
    assert len({fingerprint(resolve_spec(Path(), {**config, **change}), "dummy") for change in changes}) == 3


def test_gpt_oss_with_another_rope_window_or_without_sinks_is_another_model() -> None:
    """Routers pair nodes by this digest, handshakes and pools check it."""
    config = {**CONFIGS["gpt-oss-20b"], "rope_parameters": None, "rope_scaling": None}
    yarn = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    spec = resolve_spec(Path(), config)
    own = fingerprint(spec, "dummy")
    assert own == fingerprint(resolve_spec(Path(), {**config, "rope_scaling": yarn}), "dummy")
    assert own == fingerprint(resolve_spec(Path(), {**config, "rope_scaling": {**yarn, "truncate": None}}), "dummy")
    changes: tuple[dict[str, Any], ...] = (
        {"rope_parameters": {}}, {"rope_scaling": {**yarn, "truncate": True}}, {"rope_scaling": {**yarn, "factor": 16}},
        {"rope_theta": 1e4}, {"sliding_window": 256}, {"layer_types": ["full_attention"] * spec.num_layers},
    )  # fmt: skip
    others = [fingerprint(resolve_spec(Path(), {**config, **change}), "dummy") for change in changes]
    others.append(fingerprint(replace(spec, has_sinks=False), "dummy"))
    assert len({own, *others}) == 1 + len(others)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.sinks", "model.layers.1.mlp.experts.gate_up_proj_blocks"])
def test_sinks_and_packed_weights_are_in_the_fingerprint_of_files(name: str, tmp_path: Path) -> None:
    """Other bytes of one, and a checkpoint without it."""
    shapes: Shapes = {"model.layers.0.self_attn.sinks": [64], "model.layers.1.mlp.experts.gate_up_proj_blocks": [4, 8]}
    own = tmp_path / "own"
    own.mkdir()
    file, offset, size = write_sparse(own, shapes, 1)[name]
    spec = resolve_spec(Path(), CONFIGS["gpt-oss-20b"])
    found = {fingerprint(spec, own)}
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(b"\1" * size)
    found.add(fingerprint(spec, own))
    less = tmp_path / "less"
    less.mkdir()
    write_sparse(less, {other: shape for other, shape in shapes.items() if other != name}, 1)
    assert len({*found, fingerprint(spec, less)}) == 3
