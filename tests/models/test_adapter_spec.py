"""Each tensor of an adapter has a place in the model, or the adapter is refused with the reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pd_cluster.adapters.adapter_spec import AdapterSpec, fit_adapter
from pd_cluster.config import LoraConfig
from pd_cluster.errors import BadAdapter, StartupError
from pd_cluster.models.spec import ModulesSpec
from pd_cluster.worker.adapter_store import slots_size
from tests.models.adapter_files import (
    AXOLOTL,
    CONFIG,
    PARTS,
    PREFIX,
    TRL,
    UNSLOTH,
    Tensors,
    named,
    pair,
    pairs,
    usual,
    written,
)
from tests.models.test_fingerprint import SPEC

if TYPE_CHECKING:
    from pathlib import Path

LAYER = "model.layers.0."
Q, DOWN = f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.down_proj"
WHOLE, BASE = "a whole weight beside the adapter", "(the adapter was trained for some/base)"


def fit(directory: Path, config: dict[str, Any] = CONFIG, tensors: Tensors | None = None, **more: Any) -> AdapterSpec:
    return fit_adapter(written(directory, config, usual() if tensors is None else tensors), PARTS, **more)


@pytest.mark.parametrize("config", [CONFIG, UNSLOTH, AXOLOTL, TRL], ids=["plain", "unsloth", "axolotl", "trl"])
def test_each_module_of_the_config_has_its_matrices(tmp_path: Path, config: dict[str, Any]) -> None:
    spec = fit(tmp_path, config)
    assert [module.name for module in spec.modules] == list(named("q_proj", "down_proj"))
    scale = config["lora_alpha"] / (2 if config.get("use_rslora") else 4)
    for module in spec.modules:
        assert (module.rank, module.scale, module.part) == (4, scale, PARTS[module.name])
        assert (module.a.name, module.b.name) == tuple(f"{PREFIX}{module.name}.lora_{one}.weight" for one in "AB")
    assert spec.rank == 4
    assert len(spec.digest) == 32


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "F16"), (torch.bfloat16, "BF16"), (torch.float32, "F32")])
def test_dtypes(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    spec = fit(tmp_path, tensors={name: tensor.to(dtype) for name, tensor in usual().items()})
    assert {matrix.dtype for module in spec.modules for matrix in (module.a, module.b)} == {name}


def test_patterns_of_ranks_and_layers(tmp_path: Path) -> None:
    config = CONFIG | {
        "rank_pattern": {"layers.1.self_attn.q_proj": 8, "down_proj": 2}, "alpha_pattern": {"down_proj": 3},
        "layers_to_transform": [1],
    }  # fmt: skip
    parts = named("1.self_attn.q_proj", "1.mlp.down_proj")
    spec = fit(tmp_path, config, pairs(parts, lambda name: 8 if "q_proj" in name else 2))
    assert [(module.rank, module.scale) for module in spec.modules] == [(8, 1.0), (2, 1.5)]
    assert spec.rank == 8


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_names_of_wrappers(tmp_path: Path, prefix: str) -> None:
    """An adapter that was trained on a model with images, or on the decoder without its head."""
    tensors = {name.replace(f"{PREFIX}model.", f"{PREFIX}{prefix}"): tensor for name, tensor in usual().items()}
    config = CONFIG | {"rank_pattern": {f"^{prefix}layers.0.mlp.down_proj": 4}}
    assert len(fit(tmp_path, config, tensors).modules) == 4


def without(end: str) -> Tensors:
    return {name: tensor for name, tensor in usual().items() if not name.endswith(end)}


def with_shape(end: str, *shape: int) -> Tensors:
    return {name: torch.ones(shape) if name.endswith(end) else tensor for name, tensor in usual().items()}


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({}, "has no tensors"),
        (usual() | pair(f"{LAYER}self_attn.k_proj", (6, 8)), f"{LAYER}self_attn.k_proj, which target_modules"),
        (usual() | pair(f"{LAYER}self_attn.x_proj", (6, 8)), "x_proj cannot have an adapter: the model has no such"),
        (usual() | pair("model.layers.2.mlp.down_proj", (8, 20)), f"the model has no such product {BASE}"),
        (usual() | pair("transformer.h.0.attn.c_attn", (8, 20)), f"the model has no such product {BASE}"),
        (usual() | pair(f"{LAYER}mlp.experts.3.down_proj", (8, 20)), "adapters of experts are not served"),
        (usual() | pair(f"{LAYER}mlp.experts", (8, 20)), "adapters of experts are not served"),
        (usual() | pair(f"{LAYER}mlp.shared_expert.down_proj", (8, 20)), "adapters of experts are not served"),
        (usual() | pair(f"{LAYER}mlp.gate", (8, 20)), "adapters of a router of experts are not served"),
        (usual() | pair(f"{LAYER}self_attn.kv_b_proj", (8, 20)), "it is absorbed into attention"),
        (usual() | pair(f"{LAYER}linear_attn.in_proj_qkvz", (8, 20)), "inner projections of gated delta rules"),
        (usual() | pair("lm_head", (8, 20)), "embeddings and heads take no adapter"),
        (usual() | pair("model.embed_tokens", (8, 20)), "embeddings and heads take no adapter"),
        (usual() | pair("model.visual.blocks.0.attn.qkv", (8, 20)), "it is not of the text model"),
        (usual() | pair("model.vision_tower.layers.0.self_attn.q_proj", (8, 20)), "it is not of the text model"),
        (usual() | {f"{PREFIX}{Q}.lora_magnitude_vector": torch.ones(12)}, "lora_magnitude_vector is no A or B"),
        (usual() | {f"{PREFIX}{Q}.lora_B.bias": torch.ones(12)}, "lora_B.bias is no A or B"),
        (usual() | {f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(4, 9)}, "is an adapter of embeddings"),
        (usual() | {f"{PREFIX}lm_head.modules_to_save.weight": torch.ones(4, 9)}, f"modules_to_save.weight is {WHOLE}"),
        (usual() | {f"{PREFIX}lm_head.weight": torch.ones(4, 9)}, f"lm_head.weight is {WHOLE}"),
        (usual() | {f"{PREFIX}lm_head.base_layer.weight": torch.ones(4, 9)}, f"lm_head.base_layer.weight is {WHOLE}"),
        (usual() | {f"{PREFIX}model.embed_tokens.weight": torch.ones(9, 4)}, f"embed_tokens.weight is {WHOLE}"),
        (usual() | {f"{PREFIX}score.weight": torch.ones(2, 4)}, f"score.weight is {WHOLE}"),
        (usual() | {f"{PREFIX}{Q}.lora_A.default.weight": torch.ones(4, 8)}, "is no A or B of a LoRA"),
        (usual() | {f"{Q}.lora_A.weight": torch.ones(4, 8)}, "is no A or B of a LoRA"),
        (without("0.mlp.down_proj.lora_B.weight"), f"has lora_A of {DOWN}, and no lora_B"),
        (without("0.mlp.down_proj.lora_A.weight"), f"has lora_B of {DOWN}, and no lora_A"),
        (pairs(named("q_proj")), f"lacks {DOWN}, model.layers.1.mlp.down_proj, which target_modules of"),
        (pairs(named("q_proj")), f"names {BASE}"),
        (
            with_shape("0.self_attn.q_proj.lora_A.weight", 4, 16),
            f"lora_A of {Q} is 4 x 16, not 4 x 8: it is of another",
        ),
        (with_shape("0.self_attn.q_proj.lora_B.weight", 24, 4), "is 24 x 4, not 12 x 4: it is of another base model"),
        (with_shape("0.self_attn.q_proj.lora_A.weight", 8, 8), "is 8 x 8, not 4 x 8: its config says rank 4"),
        (with_shape("0.self_attn.q_proj.lora_B.weight", 12, 8), "is 12 x 8, not 12 x 4: its config says rank 4"),
        (with_shape("0.self_attn.q_proj.lora_B.weight", 48), "is 48, not 12 x 4: it is of another base model"),
    ],
)
def test_tensors_without_a_place_are_refused(tmp_path: Path, tensors: Tensors, told: str) -> None:
    with pytest.raises(BadAdapter, match=re.escape(told)):
        fit(tmp_path, tensors=tensors)


def test_a_smaller_base_with_fewer_layers_is_told_by_its_shapes(tmp_path: Path) -> None:
    """Not by the layers that its adapter lacks here."""
    tensors = pair(Q, (6, 4)) | pair(DOWN, (4, 10))
    with pytest.raises(BadAdapter, match=re.escape("it is of another base model (some/base)")):
        fit(tmp_path, tensors=tensors)


def test_two_spellings_of_one_module_are_refused(tmp_path: Path) -> None:
    tensors = usual() | pair(DOWN.replace("model.", "model.language_model."), (8, 20))
    with pytest.raises(BadAdapter, match="names layers in two ways"):
        fit(tmp_path, tensors=tensors)


def test_ranks_above_those_of_the_node(tmp_path: Path) -> None:
    assert fit(tmp_path, max_rank=4).rank == 4
    with pytest.raises(BadAdapter, match=f"{Q} has rank 4, and 3 is the highest here"):
        fit(tmp_path, max_rank=3)


def test_another_name_of_the_base_is_a_warning(tmp_path: Path) -> None:
    spec = fit(tmp_path)
    assert spec.base_warning("/models/base/") == ""
    assert "trained for some/base, and the model is /models/other" in spec.base_warning("/models/other")
    assert replace(spec, base_name="").base_warning("other") == ""
    assert replace(spec, base_name="D:\\models\\base").base_warning("/models/base") == ""


def test_models_of_other_modules_are_refused() -> None:
    with pytest.raises(StartupError, match=r"--lora-slots: .* transformers' modules"):
        slots_size(LoraConfig(lora_slots=1), replace(SPEC, modules=ModulesSpec("{}", 1)), tp=1)


@pytest.mark.long
def test_specs_are_read_without_torch() -> None:
    code = "import sys, pd_cluster.adapters.adapter_spec; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
