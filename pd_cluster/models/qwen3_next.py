"""Qwen3-Next, and Qwen3.5 to 3.8: gated delta rules in most layers, gated attention in the others; dense or experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from pd_cluster.models.gated_delta import GatedDelta
from pd_cluster.models.llama import Llama, LlamaLayer
from pd_cluster.models.paged_attention import PagedAttention
from pd_cluster.models.shard import Cut, RowRuns

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pd_cluster.models.forward_inputs import ForwardInputs, Tail
    from pd_cluster.models.linear import Linear, Normed, Rows
    from pd_cluster.models.mixer import LayerCache
    from pd_cluster.models.rope import RopeTable
    from pd_cluster.models.spec import StateSpec
    from pd_kernels.backends import Kernels


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """The Mixer of attention with an output gate: a sigmoid for each number."""

    kernels: Kernels
    attention: PagedAttention
    num_gates: int  # of a token: query heads * head_dim
    next_group: int  # the group of the Linear that this feeds; see Linear.group

    @property
    def group(self) -> int:
        """See Mixer."""
        return self.attention.group

    def __call__(
        self, x: torch.Tensor, angles: RopeTable, inputs: ForwardInputs, cache: LayerCache, tail: Tail | None
    ) -> Rows:
        """See Mixer. `x`: the gates of all heads, then as in PagedAttention."""
        attended = self.attention(x[:, self.num_gates :], angles, inputs, cache, tail)
        gate = x[:, : self.num_gates] if tail is None else x[tail.rows, : self.num_gates]
        if self.next_group:
            return self.kernels.sigmoid_and_mul_quantized(attended, gate, self.next_group)
        return self.kernels.sigmoid_and_mul(attended, gate)


@dataclass(frozen=True, slots=True)
class DeltaLayer(LlamaLayer):
    """A layer with a gated delta rule. `qkv`: its convolution's inputs, and output gates; see GatedDelta."""

    betas_decays: Linear  # [2 * value heads, hidden]


class Qwen3Next(Llama):
    """Weights and forward pass of one decoder. Qwen3-Next's products have the rows of each key head together."""

    offset_norms: ClassVar = True

    def _mix(
        self,
        layer: LlamaLayer,
        x: Normed,
        angles: RopeTable,
        inputs: ForwardInputs,
        cache: LayerCache,
        tail: Tail | None,
    ) -> Rows:
        if not isinstance(layer, DeltaLayer):
            return super()._mix(layer, x, angles, inputs, cache, tail)
        assert isinstance(layer.attention, GatedDelta)
        return layer.attention(layer.qkv(x), angles, inputs, cache, tail, layer.betas_decays(x))

    def _use_few_rows(self) -> None:
        """Also where other products are in float8: cuBLAS takes two launches, which let no other start early."""
        super()._use_few_rows()
        for linear in self._linears.get("betas_decays", ()):
            product = None if linear.max_few_rows else linear.few_rows_product()
            if product is not None:
                linear.use_few_rows(product, product.max_rows)

    def _feed(self, layer: LlamaLayer, following: Linear | None) -> None:
        """The norm before a delta rule stays plain, too: the product for betas and decays may read it so."""
        is_delta = following in self._parameters.linears.get("delta", ())
        layer.feed_forward.feed(layer.out, following, also_plain=is_delta)

    def _make_layer(self, name: str, index: int) -> LlamaLayer:
        if self.spec.state is not None and index in self.spec.state.layers:
            return self._make_delta_layer(name, index, self.spec.state)
        layer = super()._make_layer(name, index)
        assert isinstance(layer.attention, PagedAttention)
        gated = GatedAttention(self._kernels, layer.attention, len(self._queries), layer.out.group)
        return replace(layer, attention=gated)

    def _make_qkv(self, name: str) -> Linear:
        """Make the product for gates, queries, keys and values. In `q_proj` a head's gate follows its query."""
        size, heads = self.spec.head_dim, self._share.shard.part(self.spec.num_heads, "query heads")
        runs = RowRuns.of_things(heads, 2 * size * self.spec.num_heads, (size, size, 2 * size), (0, size, 2 * size))
        keys = {f"{name}.{part}_proj": self._keys for part in ("k", "v")}
        parts: dict[str, Cut | RowRuns] = {f"{name}.q_proj": runs, **keys}
        return self._parameters.linear("qkv", parts, self.spec.hidden_size)

    def _make_delta_layer(self, name: str, index: int, state: StateSpec) -> DeltaLayer:
        spec, weights, module = self.spec, self._parameters, f"{name}.linear_attn"
        key_heads = self._share.shard.part(state.key_heads, "key heads of delta rules")
        value_heads = range(key_heads.start * state.ratio, key_heads.stop * state.ratio)
        values = Cut.of_things(value_heads, state.value_heads, state.value_dim)
        input_norm = weights.norm(f"{name}.input_layernorm.weight", spec.hidden_size)
        products, gates = self._delta_rows(module, state, key_heads)
        qkv = weights.linear("delta", products, spec.hidden_size)
        betas_decays = weights.linear("betas_decays", gates, spec.hidden_size)
        runs = _by_kind(state, key_heads)
        convolution = weights.tensor(f"{module}.conv1d.weight", runs.total, 1, state.width, own=runs)
        mixer = GatedDelta(
            self._kernels,
            len(spec.group_windows),
            convolution.flatten(1),
            weights.tensor(f"{module}.A_log", state.value_heads, wide=True, own=value_heads),
            weights.tensor(f"{module}.dt_bias", state.value_heads, wide=True, own=value_heads),
            weights.tensor(f"{module}.norm.weight", state.value_dim),  # plain, unlike the other norms
            spec.norm_eps,
        )
        out = weights.linear("delta_out", {f"{module}.out_proj": spec.hidden_size}, values, adds=True)
        return DeltaLayer(
            input_norm=input_norm,
            qkv=qkv,
            attention=replace(mixer, next_group=out.group),
            out=out,
            post_norm=weights.norm(f"{name}.post_attention_layernorm.weight", spec.hidden_size),
            feed_forward=self._make_feed_forward(name, index),
            betas_decays=betas_decays,
        )

    def _delta_rows(
        self, module: str, state: StateSpec, own: range
    ) -> tuple[Mapping[str, Cut | RowRuns], Mapping[str, Cut | RowRuns]]:
        """The rows of both products of a delta rule, of this rank's key heads `own`; see GatedDelta."""
        keys, values = state.key_dim, state.ratio * state.value_dim
        size = state.channels + values
        of_kinds = ((0, keys, size), (keys, keys, size), (2 * keys, values, size), (2 * keys + values, values, size))
        of_gates = ((0, state.ratio, 2 * state.ratio), (state.ratio, state.ratio, 2 * state.ratio))
        return (
            {f"{module}.in_proj_qkvz": RowRuns.of_things(own, state.key_heads * size, *of_kinds)},
            {f"{module}.in_proj_ba": RowRuns.of_things(own, 2 * state.value_heads, *of_gates)},
        )


class Qwen35(Qwen3Next):
    """Qwen3.5 to 3.8: products have the rows of all heads together, each kind in turn."""

    def _delta_rows(
        self, module: str, state: StateSpec, own: range
    ) -> tuple[Mapping[str, Cut | RowRuns], Mapping[str, Cut | RowRuns]]:
        values = Cut.of_things(own, state.key_heads, state.ratio * state.value_dim)
        heads = Cut.of_things(own, state.key_heads, state.ratio)
        return (
            {f"{module}.in_proj_qkv": _by_kind(state, own), f"{module}.in_proj_z": values},
            {f"{module}.in_proj_b": heads, f"{module}.in_proj_a": heads},
        )


def _by_kind(state: StateSpec, own: range) -> RowRuns:
    """The rows of key heads `own` in a tensor that has all queries, then all keys, then all values."""
    keys, values = state.key_dim, state.ratio * state.value_dim
    all_keys = state.key_heads * keys
    kinds = ((0, keys, keys), (all_keys, keys, keys), (2 * all_keys, values, values))
    return RowRuns.of_things(own, state.key_heads * state.channels, *kinds)
