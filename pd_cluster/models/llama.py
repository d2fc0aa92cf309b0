"""Llama and its near kin (Mistral, Qwen2, Qwen3): pre-norm decoder, rotary attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pd_cluster.models.layers import Linear, RopeTable, make_rope_table
from pd_kernels.gemm_selection import Activated, choose_product, usual_product, winner_from
from pd_kernels.values import HeadNorms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.models.spec import ModelSpec
    from pd_kernels.backends import AttentionPlan, FewRows, Kernels
    from pd_kernels.gemm_selection import Measure, Product, ProposeProducts
    from pd_kernels.values import HalfNormed


@dataclass(frozen=True, slots=True)
class Tail:
    """The rows that go on once the last layer's keys and values are written: of the others nothing more is read."""

    rows: torch.Tensor  # int64 [R] into T, each its sequence's last token; R may be 0
    plan: AttentionPlan | None  # of R sequences with one query token each, for the last layer's window; None: of all T


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One packed step. T tokens: decodes first, then prefill chunks."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]
    plans: dict[int, AttentionPlan]  # window -> plan
    tail: Tail | None  # whose logits are wanted; None: everybody's


@dataclass(slots=True)
class Stream:
    """What flows from layer to layer."""

    hidden: torch.Tensor | None  # [T, hidden_size], or its parts, not yet added to the residual; None at the entrance
    residual: torch.Tensor  # [T, hidden_size]
    angles: tuple[torch.Tensor, torch.Tensor]  # cos and sin, [T, head_dim / 2]
    normed: HalfNormed | None = None  # of the residual, by the next norm's weight: instead of `hidden`, with few tokens

    def of_rows(self, rows: torch.Tensor) -> Stream:
        """Of some of the tokens, amid a layer: what came into it is in the residual by then, the angles are used."""
        return Stream(None, self.residual[rows], self.angles)


@dataclass(slots=True)
class DecoderLayer:
    """The weights of one layer."""

    window: int
    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    head_norms: HeadNorms | None
    out: Linear  # [hidden, num_heads * head_dim]
    post_norm: torch.Tensor
    gate_up: Linear  # [2 * intermediate, hidden], activated: [T, intermediate]
    down: Linear  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class FewRowsLayer:
    """A layer's products in steps of few tokens. See backends.FewRows."""

    qkv: FewRows
    out: FewRows
    gate_up: FewRows
    down: FewRows


@dataclass(frozen=True, slots=True)
class FewRowsProducts:
    """Of the whole model, in steps of up to `max_rows` tokens."""

    layers: list[FewRowsLayer]
    head: FewRows
    max_rows: int


class Llama:
    """Weights and forward pass of one decoder. `slots` says which checkpoint tensor goes where."""

    def __init__(
        self, spec: ModelSpec, kernels: Kernels, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.dtype, self.device = dtype, device
        self.slots: dict[str, torch.Tensor] = {}  # checkpoint name -> the (part of a) parameter that it fills
        self._kernels = kernels
        self._scale = spec.head_dim**-0.5
        self._rope: RopeTable = make_rope_table(spec.rope, spec.head_dim, max_len, dtype, device)
        self._embedding = self._tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._layers = [
            self._make_layer(f"model.layers.{index}", spec.windows[index]) for index in range(spec.num_layers)
        ]
        self._norm = self._tensor("model.norm.weight", spec.hidden_size)
        self._few_rows: FewRowsProducts | None = None
        if spec.tied_embeddings:
            self._head = Linear(self._embedding, None)
        else:
            self._head = Linear(self._tensor("lm_head.weight", spec.vocab_size, spec.hidden_size), None)

    @property
    def windows(self) -> frozenset[int]:
        """The distinct windows of its layers; a step needs an attention plan for each."""
        return frozenset(self.spec.windows)

    @property
    def last_window(self) -> int:
        """The last layer's, for which a `Tail` is planned."""
        return self._layers[-1].window

    def finish_loading(self) -> None:
        """After every slot is filled: let CPU products have the layout they like. The slots are void afterwards."""
        self.slots.clear()
        self._few_rows = self._make_few_rows()  # before the weights are put into another layout
        for layer in self._layers:
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                linear.pack()
        self._head.pack(keep_weight=self.spec.tied_embeddings)

    def choose_products(
        self, decodes: Sequence[int], prompts: Sequence[int], propose: ProposeProducts, measure: Measure
    ) -> int:
        """Multiply in the fastest ways proposed; returns how many of them are not torch's.

        For steps of so many decodes, and for steps of so many tokens, few of which sample: no logits are wanted of them
        all. Raises RuntimeError when the device fails.
        """
        kinds = {name: [getattr(layer, name) for layer in self._layers] for name in ("qkv", "out", "gate_up", "down")}
        num_chosen, few = 0, 0 if self._few_rows is None else self._few_rows.max_rows
        for name, linears in {**kinds, "head": [self._head]}.items():
            if linears[0].bias is None:
                sizes = sorted({size for size in (*decodes, *(prompts if name in kinds else ())) if size > few})
                normed = name in ("out", "down")
                found = {size: self._choose_product(size, linears, normed, propose, measure) for size in sizes}
                chosen = {size: product for size, product in found.items() if product is not None}
                num_chosen += len(chosen)
                for linear in linears:
                    linear.use(chosen, winner_from(found, self._gated_products(sizes[-1], linear)) if sizes else None)
        return num_chosen

    def _choose_product(
        self, num_rows: int, linears: Sequence[Linear], normed: bool, propose: ProposeProducts, measure: Measure
    ) -> Product | None:
        """For linears of one shape. `normed`: what they come to is added to the residual, which is normed."""
        weights, activate = [linear.weight for linear in linears], linears[0].activate
        if activate is None:
            finish = self._add_and_norm(num_rows) if normed else None
            return choose_product(num_rows, weights, propose, measure, finish)
        gated = self._gated_products(num_rows, linears[0])

        def propose_activated(num_rows: int, weight: torch.Tensor, parts: int = 1) -> list[Product]:
            return [*(Activated(product, activate) for product in propose(num_rows, weight)), *gated]

        usual = Activated(usual_product, activate)
        return choose_product(num_rows, weights, propose_activated, measure, usual=usual, favoured=gated)

    def _gated_products(self, num_rows: int, linear: Linear) -> Sequence[Product]:
        return () if linear.activate is None else self._kernels.gated_products(num_rows, linear.weight)

    def forward(self, inputs: ForwardInputs, layer_views: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Logits [R, vocab_size] of the tail's rows, or of all T. Writes the step's keys and values into `layer_views`.

        `layer_views`: per layer the cache's K and V views, each [num_blocks, num_kv_heads, block_size, head_dim].
        """
        stream = self.enter(inputs.token_ids, inputs.positions)
        query = self.before_attention(0, stream, inputs.slot_mapping, *layer_views[0])
        for index in range(1, len(self._layers)):
            attended = self.attend(index - 1, query, inputs.plans, *layer_views[index - 1])
            self.after_attention(index - 1, stream, attended)
            query = self.before_attention(index, stream, inputs.slot_mapping, *layer_views[index])
        return self.finish(stream, query, inputs, *layer_views[-1])

    def enter(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Stream:
        """Of T tokens."""
        return Stream(None, F.embedding(token_ids, self._embedding), self._rope.at(positions))

    def before_attention(
        self,
        index: int,
        stream: Stream,
        slot_mapping: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Layer `index`'s rotated queries [T, num_heads, head_dim]; its keys and values go to `slot_mapping`."""
        layer, few = self._layers[index], self._few_rows
        if few is not None and stream.normed is not None:
            heads = few.layers[index].qkv(stream.normed)
        else:
            heads = layer.qkv(self._norm_into(stream, layer.input_norm))
        heads = heads.view(len(slot_mapping), -1, self.spec.head_dim)
        return self._kernels.norm_rope_write(
            heads, layer.head_norms, *stream.angles, key_cache, value_cache, slot_mapping
        )

    def attend(
        self,
        index: int,
        query: torch.Tensor,
        plans: dict[int, AttentionPlan],
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> torch.Tensor:
        """[T, num_heads, head_dim] -> the same."""
        return plans[self._layers[index].window].run(query, key_cache, value_cache, self._scale)

    def after_attention(self, index: int, stream: Stream, attended: torch.Tensor) -> None:
        """The rest of layer `index`, into `stream`."""
        layer, attended = self._layers[index], attended.view(attended.shape[0], -1)
        if self._few_rows is not None and len(attended) <= self._few_rows.max_rows:
            few, eps = self._few_rows.layers[index], self.spec.norm_eps
            next_norm = self._layers[index + 1].input_norm if index + 1 < len(self._layers) else self._norm
            hidden = few.gate_up(few.out.add_to(stream.residual, attended, layer.post_norm, eps))
            stream.normed = few.down.add_to(stream.residual, hidden, next_norm, eps)
            return
        stream.hidden = layer.out(attended)
        hidden = self._norm_into(stream, layer.post_norm)
        stream.hidden = layer.down(layer.gate_up(hidden))

    def finish(
        self,
        stream: Stream,
        query: torch.Tensor,
        inputs: ForwardInputs,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> torch.Tensor:
        """From the last layer's queries [T, num_heads, head_dim] to the logits. See `forward`."""
        tail, plan = inputs.tail, inputs.plans[self.last_window]
        if tail is None:
            attended = plan.run(query, key_cache, value_cache, self._scale)
        elif not len(tail.rows):  # chunks in the middle of prompts
            return query.new_empty(0, self.spec.vocab_size)
        elif tail.plan is None:
            attended = plan.run(query, key_cache, value_cache, self._scale)[tail.rows]
        else:
            attended = tail.plan.run(query[tail.rows], key_cache, value_cache, self._scale)
        if tail is not None:
            stream = stream.of_rows(tail.rows)
        self.after_attention(len(self._layers) - 1, stream, attended)
        if self._few_rows is not None and stream.normed is not None:
            return self._few_rows.head(stream.normed)
        return self._head(self._norm_into(stream, self._norm))

    def _norm_into(self, stream: Stream, weight: torch.Tensor) -> torch.Tensor:
        """Add what the last part produced to the residual; returns it normed."""
        eps = self.spec.norm_eps
        if stream.hidden is None:
            return self._kernels.rms_norm(stream.residual, weight, eps)
        hidden, stream.residual = self._kernels.add_rms_norm(stream.hidden, stream.residual, weight, eps)
        return hidden

    def _add_and_norm(self, num_rows: int) -> Callable[[torch.Tensor], object]:
        """What follows the output and the down product."""
        residual = torch.zeros(num_rows, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        return lambda x: self._kernels.add_rms_norm(x, residual, self._norm, self.spec.norm_eps)

    def _make_few_rows(self) -> FewRowsProducts | None:
        """None where the kernels have nothing for some weight."""
        found: list[FewRows] = []
        linears = [linear for layer in self._layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        gated = {id(layer.gate_up) for layer in self._layers}
        for linear in (*linears, self._head):
            product = self._kernels.few_rows(linear.weight, linear.bias, id(linear) in gated)
            if product is None:
                return None
            found.append(product)
        layers = [FewRowsLayer(*found[start : start + 4]) for start in range(0, len(linears), 4)]
        return FewRowsProducts(layers, found[-1], min(product.max_rows for product in found))

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.slots[name] = tensor
        return tensor

    def _linear(
        self,
        prefix: str,
        parts: dict[str, int],
        num_inputs: int,
        bias: bool,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Linear:
        """A product merged from the checkpoint's `parts` (name -> rows), in this order."""
        num_rows = sum(parts.values())
        weight = torch.empty(num_rows, num_inputs, dtype=self.dtype, device=self.device)
        offsets = torch.empty(num_rows, dtype=self.dtype, device=self.device) if bias else None
        start = 0
        for name, rows in parts.items():
            self.slots[f"{prefix}.{name}.weight"] = weight[start : start + rows]
            if offsets is not None:
                self.slots[f"{prefix}.{name}.bias"] = offsets[start : start + rows]
            start += rows
        return Linear(weight, offsets, activate)

    def _head_norms(self, prefix: str) -> HeadNorms:
        size = self.spec.head_dim
        query, key = (self._tensor(f"{prefix}.{name}.weight", size) for name in ("q_norm", "k_norm"))
        return HeadNorms(query, key, self.spec.norm_eps)

    def _make_layer(self, prefix: str, window: int) -> DecoderLayer:
        spec, attention, mlp = self.spec, f"{prefix}.self_attn", f"{prefix}.mlp"
        query_size, key_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size}
        gate_up = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        return DecoderLayer(
            window=window,
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight", spec.hidden_size),
            qkv=self._linear(attention, qkv, spec.hidden_size, spec.qkv_bias),
            head_norms=self._head_norms(attention) if spec.qk_norm else None,
            out=self._linear(attention, {"o_proj": spec.hidden_size}, query_size, spec.out_bias),
            post_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size),
            gate_up=self._linear(mlp, gate_up, spec.hidden_size, spec.mlp_bias, self._kernels.silu_and_mul),
            down=self._linear(mlp, {"down_proj": spec.hidden_size}, spec.intermediate_size, spec.mlp_bias),
        )
