"""Random checkpoints in float8 for several ranks, rows that are not rounded, and a reader that counts bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.shapes import CONFIGS
from pd_cluster.models.quantization import SCALE_NAMES
from pd_cluster.models.registry import build_model, resolve_spec
from pd_kernels import reference, torch_experts
from pd_kernels.backends import TORCH
from pd_kernels.quantized import QuantizedRows, QuantizedWeight, RowsTwice
from tests.worker.quantized_models import BLOCKS, TENSOR, compressed

if TYPE_CHECKING:
    from pd_cluster.models.slot import Index
    from pd_kernels.quantized import Weight
    from pd_kernels.values import ExpertPart, HalfNormed

WIDE = {
    **CONFIGS["tiny"], "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 301,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256,
}  # fmt: skip
_PLAIN = ("re:.*lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$")
_BLOCKS = {**BLOCKS, "modules_to_not_convert": ["mlp.gate", "mlp.shared_expert_gate"]}
QUANTIZED: dict[str, dict[str, Any]] = {
    "dense, blocks": {**WIDE, "quantization_config": _BLOCKS},
    "dense, channels": {**WIDE, "quantization_config": compressed(ignore=_PLAIN)},
    "dense, head in channels": {**WIDE, "tie_word_embeddings": False, "quantization_config": compressed()},
    "dense, tensor": {**WIDE, "quantization_config": TENSOR},
    "experts, blocks": {**WIDE, **EXPERTS, "quantization_config": _BLOCKS},
    "experts, channels": {**WIDE, **EXPERTS, "quantization_config": compressed(ignore=_PLAIN)},
    "experts, tensor": {**WIDE, **EXPERTS, "quantization_config": compressed("tensor", ignore=_PLAIN)},
}
_GPT_OSS = {**WIDE, "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
            "attention_bias": True}  # fmt: skip
PACKED: dict[str, dict[str, Any]] = {
    "gpt-oss": _GPT_OSS, "gpt-oss, mxfp4": {**_GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}},
}  # fmt: skip


def save_random(directory: Path, config: dict[str, Any]) -> None:
    """A checkpoint of random numbers in float32 and float8, each scale another one."""
    random = torch.Generator().manual_seed(0)
    model = build_model(resolve_spec(Path(), config), TORCH, 64, torch.float32, torch.device("cpu"))
    tensors = {}
    for name, slot in model.slots.items():
        values = torch.randn(slot.shape, generator=random)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name.endswith(SCALE_NAMES):
            values = 0.0005 * (1 + values.abs())
        elif slot.tensor.dtype is torch.float8_e4m3fn:
            values = (100 * values).clamp(-448, 448)
        else:
            values = 0.1 * values
        tensors[name] = values.to(slot.tensor.dtype)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


def _unrounded(x: torch.Tensor, group: int) -> QuantizedRows:
    return QuantizedRows(x, x.new_ones(len(x), -(-x.shape[1] // group)), group)


def _plain_experts(
    x: torch.Tensor | HalfNormed | RowsTwice,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    part: ExpertPart | None = None,
) -> torch.Tensor:
    plain = [reference.dequantize(one) if isinstance(one, QuantizedWeight) else one for one in (gate_up, down)]
    return torch_experts.experts(x, scores, chosen, plain[0], plain[1], part=part)


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int
) -> tuple[QuantizedRows, torch.Tensor]:
    normed, total = TORCH.add_rms_norm(x, residual, weight, eps)
    return _unrounded(normed, group), total


def _add_norm_twice(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int
) -> tuple[RowsTwice, torch.Tensor]:
    normed, total = TORCH.add_rms_norm(x, residual, weight, eps)
    return RowsTwice(normed, _unrounded(normed, group)), total


def _gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group: int) -> QuantizedRows:
    return _unrounded(TORCH.state.gated_norm(x, gate, weight, eps).flatten(1), group)


UNROUNDED = replace(
    TORCH,
    quantize=_unrounded,
    quantized_product=lambda rows, weight, dtype: (rows.values @ reference.dequantize(weight).T).to(dtype),
    silu_and_mul_quantized=lambda x, group: _unrounded(TORCH.silu_and_mul(x), group),
    sigmoid_and_mul_quantized=lambda x, gate, group: _unrounded(TORCH.sigmoid_and_mul(x, gate), group),
    gated_norm_quantized=_gated_norm,
    add_rms_norm_quantized=_add_norm,
    add_rms_norm_twice=_add_norm_twice,
    experts=_plain_experts,
)
"""Kernels that keep rows as they are where others round them to float8."""


class CountedFile:
    """Stands in for `safetensors.safe_open`, and counts the bytes that are read."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(self, file: Path, framework: str) -> CountedFile:
        self._file = safe_open(file, framework=framework)
        return self

    def __enter__(self) -> CountedFile:
        self._tensors = self._file.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)  # type: ignore[no-untyped-call]

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._count(self._tensors.get_tensor(name))

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(self, self._tensors.get_slice(name))

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_bytes += tensor.nbytes
        return tensor


class CountedSlice:
    """A tensor of a CountedFile, before any of it is read."""

    def __init__(self, file: CountedFile, part: Any) -> None:
        self._file, self._part = file, part
        self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

    def __getitem__(self, index: Index) -> torch.Tensor:
        return self._file._count(self._part[index])


def _wide_product(rows: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    return (reference.dequantize(rows).double() @ reference.dequantize(weight).double().T).to(dtype)


# With a float64 model: products of rounded rows are added in float64
EXACT = replace(TORCH, quantized_product=_wide_product)
