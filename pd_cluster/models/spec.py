"""What a dense decoder is made of, read from a Hugging Face `config.json` without importing transformers (0.8 s).

Both spellings of the RoPE settings are read: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError
from pd_cluster.models.directory import read_json
from pd_connectors.protocol.layout import KVGroup, KVKind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ROPE_TYPES = ("default", "linear", "llama3")
ATTENTION_SHARE = 0.225  # of the products' FLOP/s, which attention of short chunks has: see `keys_per_token`


class Windows(Enum):
    """Where a family has sliding windows."""

    NONE = "none"
    ALL = "all"  # in every layer, unless `sliding_window` is null
    SOME = "some"  # with `use_sliding_window`, in the layers that `layer_types` or `max_window_layers` name


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding; the last four only for `llama3`."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One dense decoder. Everything that changes what a token's KV means is here, and nothing else."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int, ...]  # per layer; 0: full attention
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    dtype: str  # of the checkpoint: "float32", "bfloat16", "float16"

    @property
    def layer_parameters(self) -> int:
        """In the products of all layers."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def keys_per_token(self) -> int:
        """To how many keys a prompt's token beside decodes attends in the time of everything else that is done for it.

        26,600 by FLOPs in Llama 8B's shape. Measured are about 6,000, hence ATTENTION_SHARE: on an H200, bf16, beside
        30 and 60 decodes of 1,200 tokens, a token of steps of 192 took 13 us behind nothing and 26 us behind 6,000.
        Layers with a sliding window do not count, as what they cost has a bound; 0: all have one.
        """
        attention = 4 * self.windows.count(0) * self.num_heads * self.head_dim  # FLOPs a key
        return max(1, round(ATTENTION_SHARE * 2 * self.layer_parameters / attention)) if attention else 0

    def kv_groups(self, block_size: int, dtype: str) -> tuple[KVGroup, ...]:
        """The layers, grouped by window in the order in which the windows first occur. A block holds `block_size`
        tokens of `dtype`."""
        groups = []
        for window in dict.fromkeys(self.windows):
            layers = tuple(layer for layer, own in enumerate(self.windows) if own == window)
            shape = (self.num_kv_heads, len(layers), 2, block_size, self.head_dim)
            kind = KVKind.WINDOW if window else KVKind.FULL
            groups.append(KVGroup(kind, layers, shape, dtype, block_size, window))
        return tuple(groups)

    def semantic(self) -> dict[str, Any]:
        """As plain values, for the fingerprint. `max_len` and `dtype` do not change what KV means."""
        values = asdict(self)
        del values["max_len"], values["dtype"]
        return values


@dataclass(frozen=True, slots=True)
class Family:
    """Where families that share one forward pass differ."""

    qkv_bias: bool | None = None  # None: `attention_bias` decides
    out_bias: bool | None = None
    qk_norm: bool = False
    num_kv_heads: int | None = None  # default when the config has none; None: num_attention_heads
    max_len: int = 2048
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    windows: Windows = Windows.NONE


def read_spec(directory: Path, family: Family, config: Mapping[str, Any]) -> ModelSpec:
    """Build the spec from a parsed `config.json`. Raises StartupError naming the setting that cannot be served."""
    reader = _Reader(directory, config)
    reader.refuse("hidden_act", reader.optional("hidden_act", "silu") != "silu", "only silu is served")
    reader.refuse("quantization_config", bool(config.get("quantization_config")), "quantized weights are not served")
    num_heads, hidden_size = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    num_layers = reader.integer("num_hidden_layers")
    num_kv_heads = int(reader.optional("num_key_value_heads", family.num_kv_heads or num_heads))
    reader.refuse(
        "num_key_value_heads", num_heads % num_kv_heads != 0, f"{num_heads} heads cannot share {num_kv_heads}"
    )
    attention_bias = bool(reader.optional("attention_bias", False))
    max_len = int(reader.optional("max_position_embeddings", family.max_len))
    return ModelSpec(
        architecture=str(config["architectures"][0]),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(reader.optional("head_dim", family.head_dim or hidden_size // num_heads)),
        max_len=max_len,
        norm_eps=float(reader.optional("rms_norm_eps", 1e-6)),
        rope=_read_rope(reader, max_len),
        windows=_read_windows(reader, family, num_layers),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=bool(reader.optional("mlp_bias", False)),
        qk_norm=family.qk_norm,
        tied_embeddings=bool(reader.optional("tie_word_embeddings", False)),
        dtype=str(reader.optional("dtype", reader.optional("torch_dtype", "float32"))).removeprefix("torch."),
    )


def read_eos_token_ids(directory: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """EOS ids of `config.json` and `generation_config.json` together."""
    sources = [config]
    if (directory / "generation_config.json").exists():
        sources.append(read_json(directory / "generation_config.json"))
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    return frozenset(found)


class _Reader:
    """Fields of one config, with errors that name file and field."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._file = directory / "config.json"
        self._config = config

    def optional(self, name: str, default: Any) -> Any:
        value = self._config.get(name)
        return default if value is None else value

    def integer(self, name: str) -> int:
        value = self._config.get(name)
        if not isinstance(value, int) or value < 1:
            raise StartupError(f"{self._file}: {name} must be a positive integer, not {value!r}")
        return value

    def window(self) -> int:
        """Null is none; a config that leaves the setting out means the families' default of 4096."""
        return int(self._config.get("sliding_window", 4096) or 0)

    def refuse(self, name: str, condition: bool, why: str) -> None:
        if condition:
            raise StartupError(f"{self._file}: {name} = {self._config.get(name)!r} cannot be served: {why}")


def _read_rope(reader: _Reader, max_len: int) -> RopeSpec:
    new, old = reader.optional("rope_parameters", {}), reader.optional("rope_scaling", {})
    settings = {**old, **new}
    kind = settings.get("rope_type", settings.get("type", "default"))
    field = "rope_parameters" if new else "rope_scaling"
    nested = any(isinstance(value, dict) for value in settings.values())
    reader.refuse(field, nested, "RoPE settings per layer type are not served")
    reader.refuse(field, kind not in ROPE_TYPES, f"RoPE of type {kind}; served: {', '.join(ROPE_TYPES)}")
    partial = settings.get("partial_rotary_factor", reader.optional("partial_rotary_factor", 1.0))
    reader.refuse("partial_rotary_factor", partial != 1.0, "partial rotary embedding is not served")
    theta = float(settings.get("rope_theta", reader.optional("rope_theta", 10000.0)))
    if kind == "default":
        return RopeSpec(theta)
    reader.refuse(field, "factor" not in settings, "factor is missing")
    if kind == "linear":
        return RopeSpec(theta, kind, float(settings["factor"]))
    missing = [name for name in ("low_freq_factor", "high_freq_factor") if name not in settings]
    reader.refuse(field, bool(missing), f"{', '.join(missing)} missing")
    return RopeSpec(
        theta,
        kind,
        float(settings["factor"]),
        float(settings["low_freq_factor"]),
        float(settings["high_freq_factor"]),
        int(settings.get("original_max_position_embeddings", max_len)),
    )


def _read_windows(reader: _Reader, family: Family, num_layers: int) -> tuple[int, ...]:
    """Each layer's sliding window, 0 for full attention."""
    none = (0,) * num_layers
    layer_types = reader.optional("layer_types", None)
    if family.windows is Windows.ALL:
        reader.refuse("layer_types", bool(layer_types), "in this family every layer has the same window")
        return (reader.window(),) * num_layers
    if family.windows is Windows.NONE or not reader.optional("use_sliding_window", False):
        return none
    window = reader.window()
    if layer_types is None:
        first = int(reader.optional("max_window_layers", 28))
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    reader.refuse("layer_types", bool(unknown), f"{', '.join(unknown)} layers are not served")
    reader.refuse("layer_types", len(layer_types) != num_layers, f"there are {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)
