"""What changes the computation of a native model type is read or refused, beside transformers' config classes."""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch

from pd_cluster.errors import StartupError, UnservedModel
from pd_cluster.models.registry import choose_implementation, resolve_spec
from tests.models.state_models import STATE_MODELS
from tests.models.test_config_defaults import FURTHER, model_types, read_by_transformers
from tests.models.test_scaled_contexts import HERE
from tests.models.test_yarn import GPT_OSS
from tests.worker.conftest import COMMON, LATENT_MODELS, MODELS

Config = dict[str, Any]
ARCHITECTURE = {kind: name for name, kind in model_types()}
TYPES = list(ARCHITECTURE)
# They change no logits: of training, of generation, of layers that predict further tokens. Each with another value
IGNORED = {
    "attention_dropout": 0.5, "bos_token_id": 9, "eos_token_id": 9, "initializer_range": 0.5, "num_mtp_layers": 2,
    "output_router_logits": True, "pad_token_id": 9, "pretraining_tp": 2, "router_aux_loss_coef": 0.5,
    "router_jitter_noise": 0.5, "use_cache": False,
}  # fmt: skip
WITHOUT_EFFECT: dict[str, Config] = {  # nor do these, of one model type: windows that none has, a size that is another
    "qwen2_moe": {"sliding_window": 3, "max_window_layers": 1}, "qwen3_moe": {"sliding_window": 3},
    "deepseek_v2": {"head_dim": 32},
}  # fmt: skip
ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
CHANGED: Config = {  # where twice the value is none, or fits no other setting
    "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0, "mlp_only_layers": [1, 2], "num_experts_per_tok": 4,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "n_group": 2, "topk_group": 2,
    "num_attention_heads": 4, "num_key_value_heads": 1, "rope_parameters": ROPE,
}  # fmt: skip


def tiny(kind: str) -> Config:
    """A small config of the model type, where each field has a meaning."""
    name = ARCHITECTURE[kind]
    options = next(options for family, options in (MODELS | STATE_MODELS).values() if f"{family}ForCausalLM" == name)
    further: Config = {"n_group": 4, "topk_group": 3} if kind == "glm4_moe" else {}
    if name in {f"{family}ForCausalLM" for family, _ in STATE_MODELS.values()}:
        further = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_attention_heads": 6}
    if name in FURTHER:
        further |= FURTHER[name] | {"max_window_layers": 1}
    shape = {"head_dim": 16, "num_hidden_layers": 3, "architectures": [name], "model_type": kind}
    if name in {f"{family}ForCausalLM" for family, _ in LATENT_MODELS.values()}:
        del shape["head_dim"]
        further |= {"n_group": 4, "topk_group": 3, "first_k_dense_replace": 1}
        further |= {"num_attention_heads": 6, "num_key_value_heads": 6}
    return deepcopy({**COMMON, **options, **further, **shape})


def config_class(kind: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[kind]


def fields_of(kind: str) -> set[str]:
    """The fields that the model type has, and not all types."""
    from transformers import PreTrainedConfig

    of_all = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {field.name for field in dataclasses.fields(config_class(kind))} - of_all


def another(name: str, value: Any, kind: str) -> Any:
    """Another value of a setting."""
    if name == "rope_parameters" and kind == "gemma3_text":
        return {"full_attention": ROPE, "sliding_attention": {"rope_type": "default"}}
    if name in CHANGED or isinstance(value, str):
        return CHANGED.get(name, "gelu")
    return not value if isinstance(value, bool) else 2 * value


def reading(config: Config) -> Any:
    """What a config means here; "refused" if it is."""
    try:
        return resolve_spec(HERE, deepcopy(config))
    except StartupError:
        return "refused"


def logits_of(config: Config, weights: dict[str, torch.Tensor] | None = None) -> tuple[Any, torch.Tensor]:
    """Weights of transformers' model, and its logits of 12 tokens. `weights`: those to compute with."""
    import transformers
    from transformers import AutoConfig

    known = deepcopy({name: value for name, value in config.items() if name != "architectures"})
    parsed = AutoConfig.for_model(known.pop("model_type"), **known)
    parsed._attn_implementation, parsed.dtype = "eager", torch.float32
    model = getattr(transformers, config["architectures"][0])(parsed).eval()
    model.load_state_dict(weights or model.state_dict())
    with torch.inference_mode():
        return model.state_dict(), model(torch.arange(5, 17)[None]).logits


@pytest.mark.parametrize("kind", TYPES)
def test_a_field_of_the_model_type_is_read_or_refused_or_known_to_change_nothing(kind: str) -> None:
    base = tiny(kind)
    meant, whole, names = resolve_spec(HERE, base), read_by_transformers(base), config_class(kind).attribute_map
    fields = fields_of(kind) - IGNORED.keys() - WITHOUT_EFFECT.get(kind, {}).keys()
    assert len(fields) >= 13
    lost = {
        name for name in fields if reading({**base, name: another(name, whole[names.get(name, name)], kind)}) == meant
    }
    assert not lost


@pytest.mark.long
@pytest.mark.parametrize("kind", TYPES)
def test_fields_that_are_not_read_change_no_logits_of_transformers(kind: str) -> None:
    """Attention to later tokens does: it shows that logits can differ."""
    base = tiny(kind)
    ignored = {**IGNORED, **WITHOUT_EFFECT.get(kind, {})}
    changes = {name: value for name, value in ignored.items() if name in fields_of(kind)}
    weights, expected = logits_of(base)
    assert torch.equal(logits_of({**base, **changes}, weights)[1], expected)
    assert not torch.allclose(logits_of({**base, "is_causal": False}, weights)[1], expected)


@pytest.mark.parametrize("kind", TYPES)
def test_settings_of_all_model_types_that_change_the_computation_are_refused(kind: str) -> None:
    base = tiny(kind)
    assert reading({**base, "is_causal": True, "per_layer_config": {}}) == resolve_spec(HERE, base)
    settings: tuple[Config, ...] = ({"is_causal": False}, {"is_causal": None}, {"per_layer_config": {"1": {"a": 2}}})
    for setting in settings:
        with pytest.raises(UnservedModel, match=f"{next(iter(setting))} = .* cannot be served"):
            resolve_spec(HERE, {**base, **setting})


@pytest.mark.parametrize("kind", [kind.removesuffix("_text") for kind in TYPES if kind.startswith("qwen3_5")])
def test_a_wrapper_has_the_settings_of_the_text_type_that_transformers_reads(kind: str) -> None:
    base = tiny(f"{kind}_text")
    text = {name: value for name, value in base.items() if name not in ("architectures", "model_type")}
    theirs = read_by_transformers({"model_type": kind, "text_config": text})["text_config"]
    assert theirs["model_type"] == base["model_type"]
    wrapper = base["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    found = resolve_spec(HERE, {"architectures": [wrapper], "model_type": kind, "text_config": text})
    assert found == resolve_spec(HERE, {**theirs, "architectures": base["architectures"]}) == resolve_spec(HERE, base)


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in TYPES if config_class(kind).attribute_map])
def test_other_names_of_settings_count_as_in_transformers(kind: str) -> None:
    """Only experts are refused where both names are set, and differ."""
    pairs = [pair for pair in config_class(kind).attribute_map.items() if pair[0] not in (*IGNORED, "head_dim")]
    names = [name for pair in pairs for name in pair]
    values: tuple[Any, ...] = (None, False, True) if kind == "internlm3" else (None, 8, 16)
    base = {
        name: value for name, value in tiny(kind).items() if "experts" not in name or name.startswith("num_experts_")
    }
    compared = 0
    for chosen in product(values, repeat=len(names)):
        given = {name: value for name, value in zip(names, chosen, strict=True) if value is not None}
        config = base | given
        try:
            whole = read_by_transformers(config)
        except Exception:  # transformers raises many kinds
            assert reading(config) == "refused", given
            continue
        if kind == "internlm3" or len(given) == 1 or len(set(given.values())) == 1:
            assert reading(config) == resolve_spec(HERE, whole), given
            compared += 1
        else:
            assert reading(config) == "refused", given
    assert compared >= 6


def test_the_rotary_size_of_glm_4_7_flash_has_two_names() -> None:
    base = tiny("glm4_moe_lite")
    rest = {name: value for name, value in base.items() if name != "qk_rope_head_dim"}
    for config in ({**rest, "head_dim": 16}, {**rest, "head_dim": 16, "qk_rope_head_dim": 16}):
        assert reading(config) == resolve_spec(HERE, read_by_transformers(config))
        assert reading(config).latent.rope == 16
    assert reading({**base, "head_dim": 16}) == "refused"


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("iquestcoder", {"use_sliding_window": True}),
        ("iquestcoder", {"clip_qkv": 8.0}),
        ("internlm3", {"bias": True}),
        ("internlm3", {"qkv_bias": True, "bias": False}),
        ("internlm3", {"attention_bias": True}),
    ],
    ids=str,
)
def test_what_transformers_refuses_of_a_model_type_is_refused(kind: str, setting: Config) -> None:
    from huggingface_hub.errors import StrictDataclassClassValidationError

    with pytest.raises(StrictDataclassClassValidationError, match="not support"):
        read_by_transformers({**tiny(kind), **setting})
    with pytest.raises(UnservedModel, match="cannot be served"):
        choose_implementation(HERE, {**tiny(kind), **setting}, "auto")
    assert reading({**tiny(kind), **dict.fromkeys(setting)}) == resolve_spec(HERE, tiny(kind))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen2_moe"])
def test_layers_with_windows_that_no_setting_turns_on_are_refused(kind: str) -> None:
    """transformers' forward fails, but for Qwen2-MoE, with windows of no token."""
    config = {**tiny(kind), "use_sliding_window": False, "use_cache": False}
    assert reading({**config, "layer_types": ["full_attention"] * 3}) == resolve_spec(HERE, config)
    lost = {**config, "layer_types": CHANGED["layer_types"]}
    with pytest.raises(UnservedModel, match=r"layer_types = .* cannot be served: without use_sliding_window"):
        resolve_spec(HERE, lost)
    weights, expected = logits_of(config)
    if kind == "qwen2_moe":
        assert not torch.allclose(logits_of(lost, weights)[1], expected)
    else:
        with pytest.raises(ValueError, match="Could not find a `sliding_window`"):
            logits_of(lost, weights)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, "auto"),
        ({"rope_scaling": None}, "auto"),
        ({"rope_scaling": {}, "rope_parameters": None}, "auto"),
        pytest.param({"rope_scaling": None}, "transformers", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_context_of_gpt_oss_without_settings_of_rope_is_what_the_config_names(config: Config, wanted: str) -> None:
    left_out = ("rope_parameters", "max_position_embeddings")
    published = {name: value for name, value in tiny("gpt_oss").items() if name not in left_out} | config
    for length in ({"max_position_embeddings": 4096}, {"max_position_embeddings": 200000}, {}):
        theirs = read_by_transformers({**published, **length})
        assert GPT_OSS.items() <= theirs["rope_parameters"].items()
        spec, _ = choose_implementation(HERE, {**published, **length}, wanted)
        assert spec.max_len == theirs["max_position_embeddings"] == length.get("max_position_embeddings", 131072)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_modules_of_transformers_are_not_served_with_attention_to_later_tokens(kind: str) -> None:
    with pytest.raises(UnservedModel, match="is_causal = false: attention to later tokens is not served"):
        choose_implementation(HERE, {**tiny(kind), "is_causal": False}, "transformers")
