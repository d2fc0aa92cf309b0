"""Read a Hugging Face `config.json` without importing transformers, which takes 0.8 s, or torch.

Both spellings of the RoPE settings are read: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling`, and
both in one config, see `_rope_settings`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError, UnservedModel
from pd_cluster.models.config_reader import FLOAT32_MAX, ConfigReader
from pd_cluster.models.experts_config import ExpertsRules, read_experts
from pd_cluster.models.latent_config import LatentRules, with_latent
from pd_cluster.models.quantization import BYTES_OF_FORM, read_quantization
from pd_cluster.models.rope_kinds import ROPE_KINDS
from pd_cluster.models.spec import ModelSpec, RopeSpec
from pd_cluster.models.state_config import read_state

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pd_cluster.models.quantization import QuantizationSpec
    from pd_cluster.models.spec import ExpertsSpec

_NOT_SERVED = {
    "attn_logit_softcapping": "a soft cap on scores is",
    "final_logit_softcapping": "a soft cap on logits is",
    "use_bidirectional_attention": "bidirectional attention is",
    "per_layer_config": "a layer with settings of its own is",
}


class Windows(Enum):
    """Which layers of an architecture have a sliding window."""

    NONE = "none"
    ALL = "all"  # in every layer, unless `sliding_window` is null
    SOME = "some"  # with `use_sliding_window`, in the layers that `layer_types` or `max_window_layers` name
    PATTERN = "pattern"  # in those that `layer_types` names, else in all but every `sliding_window_pattern`-th layer


@dataclass(frozen=True, slots=True)
class ConfigRules:
    """How to read the configs of one architecture.

    The fields are defaults for settings that a config leaves out, and properties that no setting changes.
    """

    qkv_bias: bool | None = None  # None: as `attention_bias` says
    out_bias: bool | None = None
    attention_bias: bool = False  # default
    other_names: tuple[tuple[str, str], ...] = ()  # of settings: (other, usual), of which transformers takes the other
    is_one_bias: bool = False  # `attention_bias` and `mlp_bias` must say the same
    refused: tuple[str, ...] = ()  # settings that other architectures read or ignore
    qk_norm: bool | None = False  # None: as `use_qk_norm` says
    norms_heads_together: bool = False  # QK norm has one row of all heads
    num_kv_heads: int | None = None  # default when the config has none; None: num_attention_heads
    max_len: int = 2048
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    windows: Windows = Windows.NONE
    tied_embeddings: bool = False  # default when the config does not say
    activation: tuple[str, str] = ("hidden_act", "silu")  # name of the setting, and the only value that is served
    query_scalar: int | None = None  # default of `query_pre_attn_scalar`; None: scores are scaled by head_dim
    rope_theta: float = 10000.0  # default
    rope: Mapping[str, Any] | None = None  # default of `rope_parameters`; None: plain RoPE
    default_window: int = 4096  # where `sliding_window` is not set; 0: none
    window_period: int = 6  # default of `sliding_window_pattern`
    has_sinks: bool = False
    norm_eps: float = 1e-6  # default
    experts: ExpertsRules | None = None  # None: every layer has a dense feed-forward
    window_rope_theta: float | None = None  # default for layers with a window; None: all layers have the same RoPE
    rotary_part: float | None = None  # default of `partial_rotary_factor`; None: heads rotate as a whole
    has_states: bool = False  # some layers have a gated delta rule, and in the others attention is gated
    latent: LatentRules | None = None  # None: attention is not latent


def read_spec(directory: Path, rules: ConfigRules, config: Mapping[str, Any]) -> ModelSpec:
    """Build the spec from a parsed `config.json`. Raises StartupError naming the setting that cannot be served."""
    others = {name: config[other] for other, name in rules.other_names if config.get(other) is not None}
    reader = ConfigReader(directory, config := {**config, **others})
    _refuse_settings(reader, rules, config)
    num_heads, hidden_size = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    num_layers = reader.integer("num_hidden_layers")
    # Here and for `head_dim` null is what Llama has without the setting, and no default of the model type
    own_kv_heads, own_dim = (
        None if reader.is_null(name) else value
        for name, value in (("num_key_value_heads", rules.num_kv_heads), ("head_dim", rules.head_dim))
    )
    num_kv_heads = reader.integer("num_key_value_heads", own_kv_heads or num_heads)
    reader.refuse(
        "num_key_value_heads", num_heads % num_kv_heads != 0, f"{num_heads} heads cannot share {num_kv_heads}"
    )
    attention_bias = bool(reader.optional("attention_bias", rules.attention_bias))
    has_bias = bool(reader.optional("mlp_bias", False))
    reader.refuse("mlp_bias", rules.is_one_bias and has_bias != attention_bias, "attention has the same biases here")
    max_len = reader.integer("max_position_embeddings", rules.max_len)
    query_scalar = rules.query_scalar and reader.integer("query_pre_attn_scalar", rules.query_scalar)
    rope, window_rope = _read_ropes(reader, rules, max_len)
    # Gemma 3's `linear` is counted in its configs' context. YaRN that no config names, in transformers' context
    is_counted = rules.window_rope_theta is not None and rope.kind != "yarn"
    if not is_counted and not _is_default_rope(reader, rules):
        max_len = scaled_length(max_len, _rope_settings(reader, rules)[1])
    head_dim = reader.integer("head_dim", own_dim or hidden_size // num_heads)
    quantization, experts, dtype = _read_weights(reader, rules, directory, config, num_layers)
    is_everywhere = rules.experts is not None and rules.experts.is_everywhere
    no_dense = experts.size if experts is not None and is_everywhere else None  # of feed-forwards: any size
    spec = ModelSpec(
        architecture=str(config["architectures"][0]),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size", no_dense),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_len=max_len,
        norm_eps=reader.number("rms_norm_eps", rules.norm_eps),
        rope=rope,
        windows=_read_windows(reader, rules, num_layers),
        qkv_bias=attention_bias if rules.qkv_bias is None else rules.qkv_bias,
        out_bias=attention_bias if rules.out_bias is None else rules.out_bias,
        mlp_bias=has_bias,
        qk_norm=bool(reader.optional("use_qk_norm", False)) if rules.qk_norm is None else rules.qk_norm,
        tied_embeddings=bool(reader.optional("tie_word_embeddings", rules.tied_embeddings)),
        dtype=str(reader.optional("dtype", dtype)).removeprefix("torch."),
        window_rope=window_rope,
        score_scale=query_scalar and query_scalar**-0.5,
        experts=experts,
        rotary_dim=_read_rotary_dim(reader, rules, head_dim) if rules.latent is None else None,
        norms_heads_together=rules.norms_heads_together,
        quantization=quantization,
        has_sinks=rules.has_sinks,
        state=read_state(reader, num_layers) if rules.has_states else None,
        gated_attention=rules.has_states,
    )
    if rules.latent is None:
        return spec
    return with_latent(spec, reader, rules.latent, *_rope_settings(reader, rules))


def _read_weights(
    reader: ConfigReader, rules: ConfigRules, directory: Path, config: Mapping[str, Any], num_layers: int
) -> tuple[QuantizationSpec | None, ExpertsSpec | None, object]:
    """How weights are quantized, the experts, and the type of the others."""
    quantization, experts = read_quantization(directory, config), None
    if rules.experts is not None:
        _refuse_beside_experts(reader, rules)
        experts = read_experts(reader, rules.experts, num_layers)
    # MiniMax-M2's config names no dtype; what a float8 checkpoint does not quantize is bfloat16
    dtype = reader.optional("torch_dtype", "bfloat16" if quantization else "float32")
    is_biased = experts is not None and experts.is_biased
    if quantization is not None and quantization.scales in BYTES_OF_FORM:
        form, quantization = quantization.scales.value, None
        reader.refuse("quantization_config", not is_biased, f"{form} is served in gpt-oss only")
        experts = experts and replace(experts, form=form)
    reader.refuse("quantization_config", quantization is not None and is_biased, "float8 weights of gpt-oss are not")
    return quantization, experts, dtype


def _refuse_settings(reader: ConfigReader, rules: ConfigRules, config: Mapping[str, Any]) -> None:
    """Raises StartupError for a setting that changes what a family computes, and that none of them has."""
    setting, activation = rules.activation
    reader.refuse(setting, reader.optional(setting, activation) != activation, f"only {activation} is served")
    for name, what in _NOT_SERVED.items():
        reader.refuse(name, bool(config.get(name)), f"{what} not served")
    reader.refuse("is_causal", not config.get("is_causal", True), "attention to later tokens is not served")
    for name in rules.refused:
        reader.refuse(name, reader.optional(name, False) is not False, "in this model type only models without it are")


def _refuse_beside_experts(reader: ConfigReader, rules: ConfigRules) -> None:
    # Which layers then have a window differs between these architectures, and between releases of transformers
    has_windows, has_bias = reader.optional("use_sliding_window", False), reader.optional("qkv_bias", True)
    has_windows = has_windows and rules.windows is not Windows.PATTERN  # which has them whatever the setting says
    reader.refuse("use_sliding_window", has_windows, "sliding windows are not served in this architecture")
    reader.refuse("qkv_bias", bool(rules.qkv_bias) and not has_bias, "in this architecture only models with it are")


def scaled_length(max_len: int, rope: Mapping[str, Any]) -> int:
    """The context that a config with `max_position_embeddings` = `max_len` means by its RoPE settings.

    Of kinds with `is_longer`, `max_len` is the original context, or the scaled one where the settings have the
    original. Raises UnservedModel for settings that are no numbers.
    """
    kind = ROPE_KINDS.get(_rope_type(rope))
    if kind is None or not kind.is_longer:
        return max_len
    name = "original_max_position_embeddings"
    factor, original = (rope.get(key) or default for key, default in (("factor", 1), (name, max_len)))
    if not all(isinstance(value, int | float) for value in (factor, original)) or original % 1 != 0:
        raise UnservedModel(f"RoPE: factor = {factor!r} and {name} = {original!r} must be numbers, the latter whole")
    return max(max_len, int(original * factor)) if 1 <= factor < FLOAT32_MAX else max_len


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _read_rotary_dim(reader: ConfigReader, rules: ConfigRules, head_dim: int) -> int | None:
    """How many dimensions of a head rotate. None: all.

    `partial_rotary_factor` is a setting of its own or one of RoPE's; MiniMax-M2 on the hub has `rotary_dim` instead.
    """
    name = "partial_rotary_factor"
    of_types = [value for value in reader.object("rope_parameters").values() if isinstance(value, dict)]
    places = [_rope_settings(reader, rules)[1], *of_types, {name: reader.optional(name, None)}]
    given = [place[name] for place in places if place.get(name) is not None]
    if rules.rotary_part is None:
        reader.refuse(name, any(part != 1.0 for part in given), "in this architecture heads rotate as a whole")
        return None
    dim = reader.integer("rotary_dim", int(rules.rotary_part * head_dim), 0)
    if given:
        dim = int(head_dim * reader.within("", {name: given[0]}).number(name))
    reader.refuse(name, not 0 < dim <= head_dim or dim % 2 != 0, f"{dim} of {head_dim} dimensions cannot rotate")
    return dim if dim < head_dim else None


def _read_ropes(reader: ConfigReader, rules: ConfigRules, max_len: int) -> tuple[RopeSpec, RopeSpec | None]:
    """RoPE of layers with full attention, and of layers with a window if it differs."""
    theta, (field, settings) = reader.number("rope_theta", rules.rope_theta), _rope_settings(reader, rules)
    full = _read_rope(reader, field, settings, theta, max_len)
    if rules.window_rope_theta is None:
        return full, None
    # By which frequencies such a model was trained is not known: transformers looks for the setting elsewhere
    reader.refuse(field, full.kind == "yarn" and not full.truncate, "YaRN of a layer type has `truncate` true")
    local_theta = reader.number("rope_local_base_freq", rules.window_rope_theta)
    of_window = reader.within("rope_parameters", reader.object("rope_parameters")).object("sliding_attention")
    window = _read_rope(reader, "rope_parameters", of_window, local_theta, max_len)
    return full, window if window != full else None


def _is_default_rope(reader: ConfigReader, rules: ConfigRules) -> bool:
    """Whether RoPE is the architecture's own. So it is with null for `rope_scaling`, as transformers 5 reads it."""
    has_none = not reader.object("rope_scaling") and reader.optional("rope_parameters", None) is None
    return rules.rope is not None and has_none


def _rope_settings(reader: ConfigReader, rules: ConfigRules) -> tuple[str, dict[str, Any]]:
    """The settings of layers with full attention, and the config's field that has them.

    Of two spellings (what transformers 5 saves, and the block of a model's card) the one counts that names a type;
    if none or both do, `rope_scaling`, as in transformers. Theta may be in the other one, where transformers loses it.
    Without both, those of the architecture. Raises StartupError if both name a type, and not the same.
    """
    old, new = (reader.object(field) for field in ("rope_scaling", "rope_parameters"))
    if _is_default_rope(reader, rules):
        new = dict(rules.rope or {})
    has_types = rules.window_rope_theta is not None
    for field, settings, is_nested in (("rope_scaling", old, False), ("rope_parameters", new, has_types)):
        nested = any(isinstance(value, dict) for value in settings.values())
        told = f"RoPE settings per layer type are {'expected' if is_nested else 'not served'}"
        reader.refuse(field, bool(settings) and nested is not is_nested, told)
    new = reader.within("rope_parameters", new).object("full_attention") if has_types else new
    kinds = _rope_type(old), _rope_type(new)
    if "default" not in kinds and kinds[0] != kinds[1]:
        raise StartupError(f"{reader.file}: rope_scaling names RoPE of type {kinds[0]}, rope_parameters {kinds[1]}")
    is_old = bool(old) and (kinds[0] != "default" or kinds[1] == "default")
    chosen, other = (old, new) if is_old else (new, old)
    shared = (name for name in ("rope_theta", "partial_rotary_factor") if reader.optional(name, None) is None)
    kept = other if has_types else {name: other[name] for name in shared if name in other}
    return "rope_scaling" if is_old else "rope_parameters", {**kept, **chosen, "rope_type": kinds[not is_old]}


def _read_rope(reader: ConfigReader, field: str, settings: Mapping[str, Any], theta: float, max_len: int) -> RopeSpec:
    """`settings`: those in the config's `field`. `theta`: used if they have no `rope_theta`."""
    name = _rope_type(settings)
    reader.refuse(field, name not in ROPE_KINDS, f"RoPE of type {name}; served: {', '.join(ROPE_KINDS)}")
    inner = reader.within(field, settings)
    return ROPE_KINDS[name].read(inner, inner.number("rope_theta", theta), max_len)


def _read_windows(reader: ConfigReader, rules: ConfigRules, num_layers: int) -> tuple[int, ...]:
    """Each layer's sliding window, 0 for full attention."""
    none = (0,) * num_layers
    layer_types = reader.optional("layer_types", None)
    if rules.windows is Windows.ALL:
        reader.refuse("layer_types", bool(layer_types), "in this architecture every layer has the same window")
        return (reader.window(rules.default_window),) * num_layers
    has_windows = rules.windows is Windows.PATTERN or reader.optional("use_sliding_window", False)
    if rules.windows is Windows.NONE or not has_windows:
        lost = isinstance(layer_types, list) and "sliding_attention" in layer_types
        may_matter = rules.windows is Windows.SOME or rules.experts is not None  # Llama's ignores the setting
        may_matter = may_matter and not rules.has_states  # `read_state` refuses other kinds of layers
        reader.refuse("layer_types", lost and may_matter, "without use_sliding_window no layer has a window")
        return none
    window = reader.window(rules.default_window)
    if layer_types is None and rules.windows is Windows.PATTERN:
        period = reader.integer("sliding_window_pattern", rules.window_period)
        return tuple(window if (layer + 1) % period else 0 for layer in range(num_layers))
    if layer_types is None:
        first = int(reader.optional("max_window_layers", 28))
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    known = isinstance(layer_types, list) and all(isinstance(kind, str) for kind in layer_types)
    reader.refuse("layer_types", not known, "a list of names is expected")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    reader.refuse("layer_types", bool(unknown), f"{', '.join(unknown)} layers are not served")
    reader.refuse("layer_types", len(layer_types) != num_layers, f"there are {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)
