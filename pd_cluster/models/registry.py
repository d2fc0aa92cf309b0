"""The architectures that are served: the rules to read their configs, and the classes that compute them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import UnservedModel
from pd_cluster.models.experts_config import ExpertsRules
from pd_cluster.models.hf_config import ConfigRules, Windows, read_spec
from pd_cluster.models.latent_config import LatentRules
from pd_cluster.models.missing_parts import missing_part
from pd_cluster.models.model_kinds import check_kind
from pd_cluster.models.model_share import ModelShare
from pd_cluster.models.wrapper import WRAPPERS, text_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from pd_cluster.models.model import BuildModel, Model
    from pd_cluster.models.spec import ModelSpec
    from pd_kernels.backends import Kernels


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to read and to compute one architecture."""

    rules: ConfigRules
    family: str = "llama.Llama"  # module and class, imported late: the API process reads configs without torch
    types: Mapping[str, ConfigRules] = field(default_factory=dict)  # `model_type`s that have other defaults

    def build(self) -> BuildModel:
        """The class of the family."""
        module, name = self.family.split(".")
        family: BuildModel = getattr(import_module(f"pd_cluster.models.{module}"), name)
        return family


_QWEN = ConfigRules(num_kv_heads=32, max_len=32768, windows=Windows.SOME)
_QWEN2_MOE = ConfigRules(
    qkv_bias=True,
    out_bias=False,
    num_kv_heads=16,
    max_len=32768,
    experts=ExpertsRules("moe_intermediate_size", is_shared=True),
)
_QWEN3_MOE = ConfigRules(qk_norm=True, num_kv_heads=4, max_len=32768, experts=ExpertsRules("moe_intermediate_size"))
_MIXTRAL = ConfigRules(
    qkv_bias=False,
    out_bias=False,
    num_kv_heads=8,
    max_len=131072,
    windows=Windows.ALL,
    default_window=0,
    norm_eps=1e-5,
    rope_theta=1e6,
    experts=ExpertsRules("intermediate_size", normalized=True),
)
_GLM4_MOE = ConfigRules(
    out_bias=False,
    qk_norm=None,
    num_kv_heads=8,
    max_len=131072,
    norm_eps=1e-5,
    rotary_part=0.5,
    experts=ExpertsRules("moe_intermediate_size", is_sigmoid=True, num_shared=1, num_dense=1),
)
_MINIMAX_M2 = ConfigRules(
    qkv_bias=False,
    out_bias=False,
    qk_norm=True,
    norms_heads_together=True,
    num_kv_heads=8,
    max_len=196608,
    head_dim=128,
    rope_theta=5e6,
    rotary_part=1.0,
    experts=ExpertsRules("intermediate_size", normalized=True, is_sigmoid=True),
)
_GEMMA3 = ConfigRules(
    qk_norm=True,
    num_kv_heads=4,
    max_len=131072,
    head_dim=256,
    windows=Windows.PATTERN,
    tied_embeddings=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    query_scalar=256,
    rope_theta=1e6,
    window_rope_theta=1e4,
)
_GPT_OSS = ConfigRules(
    attention_bias=True,
    num_kv_heads=8,
    max_len=131072,
    head_dim=64,
    windows=Windows.PATTERN,
    default_window=128,
    window_period=2,
    has_sinks=True,
    norm_eps=1e-5,
    rope_theta=150000.0,
    rope={
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    experts=ExpertsRules("intermediate_size", normalized=True, is_biased=True),
)  # fmt: skip
_LLAMA_TYPES = {
    "internlm3": ConfigRules(
        num_kv_heads=2,
        max_len=32768,
        head_dim=128,
        norm_eps=1e-5,
        other_names=(("qkv_bias", "attention_bias"), ("bias", "mlp_bias")),
        is_one_bias=True,
    ),
    "iquestcoder": ConfigRules(
        num_kv_heads=8, max_len=131072, head_dim=128, norm_eps=1e-5, refused=("use_sliding_window", "clip_qkv")
    ),
}
_QWEN3_NEXT = ConfigRules(
    qkv_bias=False,
    out_bias=False,
    qk_norm=True,
    num_kv_heads=2,
    max_len=32768,
    head_dim=256,
    rotary_part=0.25,
    has_states=True,
    refused=("attention_bias",),
    experts=ExpertsRules("moe_intermediate_size", default_normalized=True, is_shared=True),
)
_QWEN3_5_MOE = replace(
    _QWEN3_NEXT,
    experts=ExpertsRules("moe_intermediate_size", normalized=True, is_shared=True, is_everywhere=True),
)
_DEEPSEEK_V2 = ConfigRules(
    qkv_bias=False,
    out_bias=False,
    refused=("attention_bias", "mlp_bias"),
    latent=LatentRules(is_interleaved=True),
    experts=ExpertsRules("moe_intermediate_size", is_grouped=True, is_v2=True, num_shared=2),
)
_DEEPSEEK_V3 = replace(
    _DEEPSEEK_V2,
    num_kv_heads=128,
    max_len=4096,
    latent=LatentRules(),
    experts=ExpertsRules(
        "moe_intermediate_size", is_sigmoid=True, num_shared=1, num_dense=3, num_groups=8, groups_chosen=4, factor=2.5
    ),
)
_GLM4_MOE_LITE = replace(
    _DEEPSEEK_V2,
    num_kv_heads=20,
    max_len=202752,
    norm_eps=1e-5,
    latent=LatentRules(nope=192, value=256, query_rank=768, head_dim_rotates=True),
    experts=ExpertsRules(
        "moe_intermediate_size", is_sigmoid=True, num_shared=1, num_dense=1, factor=1.8, names_layers=True
    ),
)
_MISTRAL4 = replace(
    _DEEPSEEK_V2,
    num_kv_heads=32,
    max_len=1048576,
    rope={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
    # Its converter writes `mscale_all_dim` whatever the model is; the released one has plain scores. transformers grew
    # them 2.2 times in its #47435; in SGLang that lost accuracy (#26203)
    latent=LatentRules(rank=256, nope=64, query_rank=1024, is_part_rotary=True, scale_grows=False),
    experts=ExpertsRules("moe_intermediate_size", default_normalized=True, is_grouped=True, num_shared=1),
)  # fmt: skip
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(ConfigRules(), types=_LLAMA_TYPES),
    "MistralForCausalLM": Architecture(
        ConfigRules(qkv_bias=False, out_bias=False, num_kv_heads=8, max_len=131072, windows=Windows.ALL)
    ),
    "Qwen2ForCausalLM": Architecture(replace(_QWEN, qkv_bias=True, out_bias=False)),
    "Qwen3ForCausalLM": Architecture(replace(_QWEN, qk_norm=True, head_dim=128)),
    "Qwen2MoeForCausalLM": Architecture(_QWEN2_MOE),
    "Qwen3MoeForCausalLM": Architecture(_QWEN3_MOE),
    "MixtralForCausalLM": Architecture(_MIXTRAL),
    "Glm4MoeForCausalLM": Architecture(_GLM4_MOE),
    "MiniMaxM2ForCausalLM": Architecture(_MINIMAX_M2),
    "Gemma3ForCausalLM": Architecture(_GEMMA3, "gemma3.Gemma3"),
    "GptOssForCausalLM": Architecture(_GPT_OSS, "gpt_oss.GptOss"),
    "Qwen3NextForCausalLM": Architecture(_QWEN3_NEXT, "qwen3_next.Qwen3Next"),
    "Qwen3_5ForCausalLM": Architecture(replace(_QWEN3_NEXT, num_kv_heads=4, experts=None), "qwen3_next.Qwen35"),
    "Qwen3_5MoeForCausalLM": Architecture(_QWEN3_5_MOE, "qwen3_next.Qwen35"),
    "DeepseekV2ForCausalLM": Architecture(_DEEPSEEK_V2, "deepseek.Deepseek"),
    "DeepseekV3ForCausalLM": Architecture(_DEEPSEEK_V3, "deepseek.Deepseek"),
    "Glm4MoeLiteForCausalLM": Architecture(_GLM4_MOE_LITE, "deepseek.Deepseek"),
    "Mistral4ForCausalLM": Architecture(_MISTRAL4, "deepseek.Deepseek"),
}


def resolve_spec(directory: Path, config: Mapping[str, Any]) -> ModelSpec:
    """The model that a `config.json` describes.

    Raises UnservedModel for one that no family of ours can serve, StartupError for a malformed one.
    """
    config = text_config(directory, config)
    architectures = config.get("architectures")
    architectures = architectures if isinstance(architectures, list) else []
    named = ", ".join(map(str, architectures)) or "none named"
    if len(architectures) != 1 or named not in ARCHITECTURES:
        raise UnservedModel(
            f"{directory / 'config.json'}: architecture {named} is not served; "
            f"served are {', '.join([*ARCHITECTURES, *WRAPPERS])}"
        )
    architecture = ARCHITECTURES[named]
    return read_spec(directory, architecture.types.get(str(config.get("model_type")), architecture.rules), config)


def choose_implementation(directory: Path, config: Mapping[str, Any], wanted: str) -> tuple[ModelSpec, str]:
    """The model of a `config.json`, and why transformers' modules compute it; "": a family of ours does.

    `wanted`: see ModelConfig.model_impl. Raises StartupError when what is wanted cannot serve the model.
    """
    check_kind(directory, config)
    reason = "--model-impl transformers"
    if wanted != "transformers":
        try:
            return resolve_spec(directory, config), ""
        except UnservedModel as error:
            reason = str(error)
    from pd_cluster.models.transformers_spec import read_modules_spec  # imports torch and transformers

    try:
        spec = read_modules_spec(directory, config)
    except UnservedModel as error:
        missing = missing_part(config)
        told = f"{directory / 'config.json'}: {missing}" if missing else f"{reason}; {error}"
        raise error if wanted == "transformers" else UnservedModel(told) from error
    if wanted == "native":
        raise UnservedModel(f"{reason}; --model-impl transformers would serve it")
    why = reason.partition(";")[0]  # without the list of what is served
    return spec, f"{spec.architecture} by transformers' modules: right, not fast ({why})"


def build_model(
    spec: ModelSpec,
    kernels: Kernels,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device,
    share: ModelShare | None = None,
) -> Model:
    """Allocate the model for sequences of up to `max_len` tokens, or one rank's `share` of it.

    Raises torch's errors when it does not fit, and StartupError when the ranks cannot share it.
    """
    build = ARCHITECTURES[spec.architecture].build()
    return build(spec, kernels, max_len, dtype, device, share or ModelShare())
