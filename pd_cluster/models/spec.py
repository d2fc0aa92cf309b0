"""The description of a decoder."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from math import lcm
from typing import TYPE_CHECKING, Any

from pd_connectors.protocol.layout import DTYPE_BYTES, KVGroup, KVKind
from pd_kernels.packed_room import ROOMS

if TYPE_CHECKING:
    from pd_cluster.models.quantization import QuantizationSpec

_LATER_IN_ROPE = ("attention_factor", "truncate", "query_beta")  # the other fields are in all fingerprints
STATE_DISTANCE = 64  # tokens: kernels cut prompts into pieces of so many, and have the states at their ends
ATTENTION_SHARE = 0.225  # FLOP/s of attention of short chunks, relative to those of products: see `keys_per_token`


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. `kind`: see ROPE_KINDS, which says what it makes of the other fields."""

    theta: float
    kind: str = "default"
    factor: float = 1.0  # frequencies are divided by it: all of them, or the low ones
    low_freq_factor: float = 1.0  # periods within the original context of those that are divided wholly, or YaRN's slow
    high_freq_factor: float = 4.0  # and of those that stay as they are, or YaRN's fast
    original_max_len: int = 0
    attention_factor: float = 1.0  # on cos and sin
    truncate: bool = False  # YaRN: the frequencies between begin and end at whole pairs
    query_beta: float = 0.0  # queries grow by it times the logarithm of the original contexts before them (Llama 4)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention: see `pd_kernels.latent`."""

    rank: int
    rope: int
    nope: int
    value: int
    query_rank: int = 0  # of the vector that all heads' queries are expanded from; 0: they come from the hidden state
    is_interleaved: bool = True  # the checkpoint rotates pairs of adjacent numbers, in place of halves

    @property
    def width(self) -> int:
        """Cached numbers of a token and layer."""
        return self.rank + self.rope

    def replicated(self, hidden_size: int) -> int:
        """Weights of a layer that every rank has: those without heads."""
        return hidden_size * (self.query_rank + self.width)

    def expanding(self, num_heads: int) -> int:
        """Weights of a layer that expand latents. They are never quantized: see Parameters.widened."""
        return num_heads * (self.nope + self.value) * self.rank

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        """Weights in the products of one layer."""
        size, inputs = self.nope + self.rope, self.query_rank or hidden_size
        of_heads = num_heads * (size * inputs + self.value * hidden_size)
        return self.replicated(hidden_size) + of_heads + self.expanding(num_heads)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts. See `pd_kernels.values.Routing` for how a router chooses."""

    num_experts: int
    num_chosen: int  # experts of a token: those with the highest scores
    size: int  # of an expert's activations
    normalized: bool  # the scores of the chosen experts are divided by their sum
    shared_size: int = 0  # of the activations of the expert that computes every token; 0: there is none
    dense_layers: tuple[int, ...] = ()  # layers that have a dense feed-forward instead
    shared_gated: bool = True  # a sigmoid weighs the result of the expert that computes every token
    is_sigmoid: bool = False  # scores are sigmoids, and the checkpoint has a bias to choose by; else the softmax
    factor: float = 1.0  # on the scores
    num_groups: int = 1  # of experts; a token's experts are in `groups_chosen` of them
    groups_chosen: int = 1
    group_best: int = 2  # the best experts of a group, of which scores add up to its rank
    is_biased: bool = False  # router and experts have biases, and SwiGLU is clamped: see pd_kernels' BiasedExperts
    limit: float = 7.0  # of the clamped SwiGLU
    alpha: float = 1.702
    form: str = ""  # of the experts' weights: a row of pd_kernels' FORMS; "": they are not packed


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The layers with a gated delta rule (arXiv 2412.06464) in place of attention, and their states.

    Value heads h * ratio to (h + 1) * ratio - 1 belong to key head h. A convolution runs over the queries and keys of
    each key head, and the values of its value heads. `state_views` has the places in a block.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int  # inputs of the convolution

    @property
    def ratio(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution that belong to one key head."""
        return 2 * self.key_dim + self.ratio * self.value_dim

    @property
    def head_layers(self) -> int:
        """A value head's block has the inputs of all its key head's channels in so many layers: its share of them."""
        return -(-len(self.layers) // self.ratio)

    def head_floats(self, dtype_bytes: int) -> int:
        """Float32 numbers in a value head's block: its states, and inputs of `dtype_bytes` up to a multiple of 16."""
        inputs = self.head_layers * self.channels * (self.width - 1) * dtype_bytes
        return len(self.layers) * self.key_dim * self.value_dim + -(-inputs // 16) * 4


@dataclass(frozen=True, slots=True)
class ModulesSpec:
    """A decoder that transformers' modules compute."""

    config: str  # config.json without names and dtype, as sorted JSON
    layer_parameters: int  # weights of all layers


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder: everything that changes the meaning of a token's KV."""

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
    windows: tuple[int, ...]  # per layer; 0: full attention, or none: see `attention_layers`
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    dtype: str  # dtype of the checkpoint: "float32", "bfloat16", "float16"
    window_rope: RopeSpec | None = None  # RoPE of layers with a window; None: as `rope`
    score_scale: float | None = None  # factor on attention's scores; None: head_dim ** -0.5
    experts: ExpertsSpec | None = None  # None: every layer has a dense feed-forward
    rotary_dim: int | None = None  # the first dimensions of a head, which RoPE rotates; None: all
    norms_heads_together: bool = False  # with qk_norm: a token's queries are normed as one row, and its keys
    quantization: QuantizationSpec | None = None  # None: weights have the checkpoint's dtype
    has_sinks: bool = False  # each query head sees one more key, without a value
    state: StateSpec | None = None  # None: every layer has attention
    gated_attention: bool = False  # a sigmoid of each number's own weighs the output of attention
    latent: LatentSpec | None = None  # then a head has `head_dim` numbers in queries only, and there is one KV head
    # None: a family of ours computes it. Otherwise norms, RoPE and biases are described in this config only
    modules: ModulesSpec | None = None

    @property
    def attention_scale(self) -> float:
        """The factor on attention's scores."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def layer_parameters(self) -> int:
        """Number of weights in the products of all layers."""
        return self._count_parameters(self.experts.num_experts if self.experts else 0)

    def weight_bytes(self, dtype_bytes: int, num_ranks: int = 1) -> int:
        """Bytes of a rank's weights, those that are not quantized with `dtype_bytes` each.

        An estimate: all products of layers count as quantized, and scales of float8 do not count (at most 0.5%).
        Packed experts count with the room of the largest layout, which some devices do not use (gpt-oss needs none).
        """
        if self.experts is not None and self.experts.form:
            room, size = ROOMS[self.experts.form], self.experts.size
            expert = sum((*room(2 * size, self.hidden_size), *room(self.hidden_size, size)))
            num_mixed = (self.num_layers - len(self.experts.dense_layers)) * self.experts.num_experts
            layers = self._count_parameters(0) * dtype_bytes + num_mixed * expert
        else:
            layers = self.layer_parameters * (1 if self.quantization else dtype_bytes)
        if (latent := self.latent) is not None:
            own = latent.replicated(self.hidden_size) * (1 if self.quantization else dtype_bytes)
            wide = latent.expanding(self.num_heads) * (dtype_bytes - 1) if self.quantization else 0
            layers += self.num_layers * (own * (num_ranks - 1) + wide)
        embedding = self.vocab_size * self.hidden_size * dtype_bytes  # whole on every rank; a head of its own is cut
        head = 0 if self.tied_embeddings else embedding
        return int(layers + head) // num_ranks + embedding

    @property
    def keys_per_token(self) -> int:
        """Number of keys at which attention of a prompt's token takes as long as all other work for that token.

        The token is computed in a step with decodes. In Llama 8B's shape FLOPs give 26,600 keys; the measured number is
        about 6,000, hence ATTENTION_SHARE: on an H200, bf16, beside 30 and 60 decodes of 1,200 tokens, a token in steps
        of 192 took 13 us without keys before it and 26 us with 6,000. Layers with a sliding window do not count: their
        attention has a bound. 0: all layers have a window.
        """
        multiplied = self._count_parameters(self.experts.num_chosen if self.experts else 0)  # weights a token
        num_full = sum(not self.windows[layer] for layer in self.attention_layers)
        value_dim = self.head_dim if self.latent is None else self.latent.value
        attention = 2 * num_full * self.num_heads * (self.head_dim + value_dim)  # FLOPs a key
        return max(1, round(ATTENTION_SHARE * 2 * multiplied / attention)) if attention else 0

    @property
    def group_windows(self) -> tuple[int, ...]:
        """The window of each KV group: the layers with one window are a group, in the order of their first layers."""
        return tuple(dict.fromkeys(self.windows[layer] for layer in self.attention_layers))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend to keys. The others keep a state."""
        states = self.state.layers if self.state is not None else ()
        return tuple(layer for layer in range(self.num_layers) if layer not in states)

    def kv_groups(self, block_size: int, dtype: str) -> tuple[KVGroup, ...]:
        """The groups of layers, see `group_windows`. A block holds `block_size` tokens of `dtype`.

        The last group is that of the states, if there are some. They are float32; what their convolutions have seen is
        of `dtype`, the model's.
        """
        groups = []
        for window in self.group_windows:
            layers = tuple(layer for layer in self.attention_layers if self.windows[layer] == window)
            shape = (self.num_kv_heads, len(layers), 2, block_size, self.head_dim)
            kind = KVKind.WINDOW if window else KVKind.FULL
            if self.latent is not None:
                rows = (1, len(layers), block_size, self.latent.width)
                groups.append(KVGroup(KVKind.LATENT, layers, rows, dtype, block_size, sharded=False))
                continue
            groups.append(KVGroup(kind, layers, shape, dtype, block_size, window))
        if (state := self.state) is not None:
            sizes = state.value_heads, state.head_floats(DTYPE_BYTES[dtype])
            distance = lcm(block_size, STATE_DISTANCE)
            groups.append(KVGroup(KVKind.STATE, state.layers, sizes, "float32", distance))
        return tuple(groups)

    def semantic(self) -> dict[str, Any]:
        """The fields that change the meaning of KV, as plain values for the fingerprint: all but `max_len` and `dtype`.

        Fields that have their default are left out: a new field must not change the fingerprint of a model without it.
        """
        values = asdict(self)
        del values["max_len"], values["dtype"]
        if self.experts is not None:
            values["experts"] = _without_defaults(ExpertsSpec, values["experts"])
        for key in ("rope", "window_rope"):
            if rope := values[key]:
                told = _without_defaults(RopeSpec, rope)
                values[key] = {name: rope[name] for name in rope if name in told or name not in _LATER_IN_ROPE}
        return _without_defaults(ModelSpec, values)

    def _count_parameters(self, num_experts: int) -> int:
        """Weights in the products of all layers, `num_experts` of each mixture among them.

        Of transformers' modules all weights count.
        """
        if self.modules is not None:
            return self.modules.layer_parameters
        rows = self.head_dim * ((2 + self.gated_attention) * self.num_heads + 2 * self.num_kv_heads)
        mixing = self.hidden_size * rows * len(self.attention_layers)
        if self.latent is not None:
            mixing = self.num_layers * self.latent.parameters(self.hidden_size, self.num_heads)
        if (state := self.state) is not None:
            rows = state.key_heads * state.channels + 2 * state.value_heads * (state.value_dim + 1)
            mixing += self.hidden_size * rows * len(state.layers)
        dense = 3 * self.hidden_size * self.intermediate_size
        if self.experts is None:
            return mixing + self.num_layers * dense
        num_dense = len(self.experts.dense_layers)
        mixture = 3 * self.hidden_size * (num_experts * self.experts.size + self.experts.shared_size)
        return mixing + num_dense * dense + (self.num_layers - num_dense) * mixture


def _without_defaults(kind: type[ModelSpec | ExpertsSpec | RopeSpec], values: dict[str, Any]) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(kind)}
    return {name: value for name, value in values.items() if value != defaults.get(name, MISSING)}
