"""Multimodal wrappers: their text model is served, and nothing of a checkpoint is dropped unseen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.errors import StartupError
from pd_cluster.models.end_tokens import read_end_tokens
from pd_cluster.models.registry import ARCHITECTURES, resolve_spec
from pd_cluster.models.spec import ModelSpec, RopeSpec
from pd_cluster.models.tensor_names import match_slots
from pd_cluster.models.wrapper import WRAPPERS
from tests.worker.conftest import COMMON, MODELS, SavedModel
from tests.worker.driver import Driver, make_executor, random_prompts

if TYPE_CHECKING:
    from collections.abc import Callable

HUB = {  # of gemma-3-4b-it
    "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "model_type": "gemma3",
    "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip


def spec_of(text: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    return resolve_spec(Path(), {**HUB, "text_config": {**HUB["text_config"], **(text or {})}, **changes})  # type: ignore[dict-item]


def test_the_config_of_gemma_3_4b_is_read_as_that_of_its_text_model(tmp_path: Path) -> None:
    spec = spec_of()
    assert (spec.architecture, spec.dtype, spec.tied_embeddings) == ("Gemma3ForCausalLM", "bfloat16", True)
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (262208, 2560, 34)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.rope, spec.window_rope, spec.windows[:6]) == (
        RopeSpec(1e6, "linear", 8.0),
        RopeSpec(1e4),
        (1024,) * 5 + (0,),
    )
    assert read_end_tokens(tmp_path, HUB).ids == {1, 106}
    nested = {**HUB, "eos_token_id": None, "text_config": {"eos_token_id": 7}}
    assert read_end_tokens(tmp_path, nested).ids == {7}


def test_settings_of_the_wrapper_hold_for_its_text_model() -> None:
    assert not spec_of({"tie_word_embeddings": True}, tie_word_embeddings=False).tied_embeddings
    assert spec_of({"dtype": "float32"}, dtype="float16").dtype == "float16"
    assert spec_of({"dtype": "float32"}, torch_dtype="float16").dtype == "float16"
    assert spec_of({"num_attention_heads": 16, "vocab_size": 64}).num_heads == 16
    assert spec_of(quantization_config={"quant_method": "fp8"}).quantization is not None
    with pytest.raises(StartupError, match="bidirectional attention is not served"):
        spec_of({"use_bidirectional_attention": True})
    with pytest.raises(StartupError, match="Gemma3ForConditionalGeneration needs a text_config, not 'gemma'"):
        spec_of(text_config="gemma")


def test_wrappers_are_of_models_that_are_served() -> None:
    assert {wrapper.text_architecture for wrapper in WRAPPERS.values()} <= set(ARCHITECTURES)
    with pytest.raises(StartupError, match=r"Qwen2VL is not served; served are .*Gemma3ForConditionalGeneration"):
        spec_of(architectures=["Qwen2VL"])
    with pytest.raises(StartupError, match="is not served"):
        spec_of(architectures=[["Gemma3ForConditionalGeneration"]])
    with pytest.raises(StartupError, match="Gemma3ForConditionalGeneration, Qwen2VL is not served"):
        spec_of(architectures=["Gemma3ForConditionalGeneration", "Qwen2VL"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """A tiny Gemma 3 with its vision tower."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    text = {**COMMON, **MODELS["gemma3"][1]}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(-0.5, 0.5)
    directory = tmp_path_factory.mktemp("wrapper")
    model.save_pretrained(directory)
    return SavedModel(directory, model)


def saved_again(saved: SavedModel, target: Path, rename: Callable[[str], str], **more: torch.Tensor) -> Path:
    (target / "config.json").write_text((saved.directory / "config.json").read_text())
    tensors = load_file(saved.directory / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()} | more, target / "model.safetensors")
    return target


def hub_name(name: str) -> str:
    """As transformers 5 names its modules."""
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.", 1)
    return f"model.{name}"


@pytest.mark.long
@pytest.mark.parametrize("rename", [str, hub_name])
def test_the_text_model_of_a_wrapper_generates_as_in_transformers(
    saved: SavedModel, tmp_path: Path, rename: Callable[[str], str]
) -> None:
    driver, prompts = (
        Driver(make_executor(saved_again(saved, tmp_path, rename)), budget=32),
        random_prompts([5, 60], 320),
    )
    for prompt in prompts:
        driver.add(prompt)
    assert driver.run() == [saved.generate(prompt, 12) for prompt in prompts]


def test_a_tensor_that_is_not_on_the_list_is_refused_by_name(saved: SavedModel, tmp_path: Path) -> None:
    more = {"audio_tower.conv.weight": torch.ones(2), "model.norm.weight": torch.ones(48)}
    saved_again(saved, tmp_path, str, **more)
    message = r"json; unknown: audio_tower\.conv\.weight; stored twice: model\.norm\.weight$"
    with pytest.raises(StartupError, match=message):
        make_executor(tmp_path)
    saved_again(saved, tmp_path, lambda name: name.replace("layers.6.mlp.up", "layers.6.mlp.upper"))
    message = r"missing: model\.layers\.6\.mlp\.up_proj\.weight; unknown: language_model\.model.layers\.6\.mlp\.upper"
    with pytest.raises(StartupError, match=message):
        make_executor(tmp_path)


SLOTS = {"model.embed_tokens.weight", "model.layers.0.q.weight", "model.layers.1.q.weight"}


@pytest.mark.parametrize(
    ("more", "unknown"),
    [
        (["model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.fc.weight", "visual.blocks.0.norm1.bias"], set()),
        (["model.layers.2.q.weight"], {"model.layers.2.q.weight"}),
        (["model.layers.2.eh_proj.weight", "model.layers.2.q.weight", "model.layers.2.shared_head.norm.weight"], set()),
        (
            [
                f"model.layers.2.{name}.weight"
                for name in ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.head")
            ]
            + ["model.layers.2.mlp.gate.e_score_correction_bias"],
            set(),
        ),
        (["model.layers.2.eh_proj.weight", "model.layers.20.q.weight"], {"model.layers.20.q.weight"}),
        (["model.layers.1.eh_proj.weight"], {"model.layers.1.eh_proj.weight"}),
        (["model.language_model.layers.2.eh_proj.weight", "model.language_model.layers.2.q.weight"], set()),
        (["model.layers.0.mtp.weight", "xvisual.weight"], {"model.layers.0.mtp.weight", "xvisual.weight"}),
        (["lm_head.weight"], {"lm_head.weight"}),
        (["other.eh_proj.weight", "other.q.weight"], {"other.eh_proj.weight", "other.q.weight"}),
    ],
)
def test_layers_for_multi_token_prediction_are_ignored_and_others_are_not(more: list[str], unknown: set[str]) -> None:
    found, problems = match_slots([*SLOTS, *more], SLOTS, tied_embeddings=False)
    assert found == {name: name for name in SLOTS}
    assert problems == {"missing": set(), "unknown": unknown, "stored twice": set()}


def test_a_tied_head_may_be_stored_under_any_prefix() -> None:
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        assert not any(match_slots([*SLOTS, name], SLOTS, tied_embeddings=True)[1].values())
        found, _ = match_slots([*SLOTS, name], SLOTS | {"lm_head.weight"}, tied_embeddings=False)
        assert found[name] == "lm_head.weight"
