"""The base class of all model families: embedding and head, the end of loading, the choice of products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F

from pd_cluster.models.adapter_slots import AdapterSlots
from pd_cluster.models.head_norms import HeadNormsOverRanks
from pd_cluster.models.linear_group import LinearGroup
from pd_cluster.models.paged_attention import PagedAttention
from pd_cluster.models.parameters import Parameters
from pd_cluster.models.rope import RopeTable, make_rope_table
from pd_cluster.models.shard import Cut
from pd_kernels.values import HalfNormed, HeadNorms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pd_cluster.models.forward_inputs import ForwardInputs, Tail
    from pd_cluster.models.linear import Linear, Normed, Rows
    from pd_cluster.models.linear_part import LinearPart
    from pd_cluster.models.mixer import LayerCache, Mixer
    from pd_cluster.models.model_share import ModelShare
    from pd_cluster.models.slot import Slot
    from pd_cluster.models.spec import ModelSpec
    from pd_kernels.backends import Kernels
    from pd_kernels.gemm_selection import Measure, ProposeProducts


class Layer(Protocol):
    """The weights of one layer: those before and of attention. A family declares further fields."""

    @property
    def input_norm(self) -> torch.Tensor:
        """The weight of the first norm, [hidden_size]."""

    @property
    def qkv(self) -> Linear:
        """[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]."""

    @property
    def attention(self) -> Mixer: ...


FamilyLayer = TypeVar("FamilyLayer", bound=Layer)


class Decoder(ABC, Generic[FamilyLayer]):
    """A Model. A family makes one layer in `_make_layer`, and computes what is after attention in `_finish_layer`."""

    offset_norms: ClassVar = False  # see Parameters
    wide_norms: ClassVar = False

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        share: ModelShare,
    ) -> None:
        """See BuildModel. Raises StartupError if the ranks cannot share the model evenly."""
        self.spec = spec
        self.dtype, self.device = dtype, device
        ropes = [spec.window_rope or spec.rope if window else spec.rope for window in spec.group_windows]
        distinct, rotary_dim = list(dict.fromkeys(ropes)), spec.rotary_dim or spec.head_dim
        self._ropes = [make_rope_table(rope, rotary_dim, max_len, dtype, device) for rope in distinct]
        self._rope_of_group = [distinct.index(rope) for rope in ropes]
        if spec.state is not None:
            self._rope_of_group.append(0)  # the last group, which does not rotate
        self._kernels = kernels
        self._share, shard = share, share.shard
        self._queries = shard.cut(spec.num_heads, "query heads", spec.head_dim)
        self._keys = shard.cut_kv_heads(spec.num_kv_heads, spec.head_dim)
        self.head_ids = shard.vocabulary(spec.vocab_size)
        self._num_logits = -(-spec.vocab_size // shard.size)
        self._parameters = Parameters(
            kernels,
            dtype,
            device,
            offset_norms=self.offset_norms,
            wide_norms=self.wide_norms,
            quantization=spec.quantization,
            share=share,
        )
        # Weights are allocated in the order in which a step reads them
        self._embedding = self._parameters.tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._layers = [self._make_layer(f"model.layers.{index}", index) for index in range(spec.num_layers)]
        self._norm = self._parameters.norm("model.norm.weight", spec.hidden_size)
        if spec.tied_embeddings:
            rows = self._embedding[self.head_ids.start : self.head_ids.stop]
            self._head = self._parameters.tied_linear("head", rows)
        else:
            head = Cut(spec.vocab_size, self.head_ids)
            self._head = self._parameters.linear("head", {"lm_head": head}, spec.hidden_size)
        self._next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        self.adapters: AdapterSlots | None = None
        for layer, following in zip(self._layers, [*self._layers[1:], None], strict=True):
            self._feed(layer, following.qkv if following else None)

    @property
    def slots(self) -> dict[str, Slot]:
        """See Model."""
        return self._parameters.slots

    @property
    def parts(self) -> Mapping[str, LinearPart]:
        """The modules of the checkpoint that are parts of linears, by name."""
        return self._parameters.parts

    def linear_of(self, part: LinearPart) -> Linear:
        """The Linear that has this part."""
        return self._parameters.linears[part.kind][part.index]

    def make_adapters(self, parts: Mapping[str, LinearPart], num_slots: int, max_rank: int) -> AdapterSlots:
        """Give the linears of these parts slots for adapters. Raises StartupError."""
        linears, kernels = self._parameters.linears, self._kernels
        self.adapters = AdapterSlots(linears, parts, num_slots, max_rank, self.dtype, self.device, kernels)
        return self.adapters

    def order_of(self, part: LinearPart) -> torch.Tensor | None:
        """The part's rows in the order of the loaded model, counted from its first one. None: they were not moved."""
        order, end = self.linear_of(part).row_order, part.start + len(part.rows)
        return None if order is None else order[part.start : end] - part.start

    @abstractmethod
    def _make_layer(self, name: str, index: int) -> FamilyLayer:
        """Make the layer `name` of the checkpoint, which is the layer `index` of the spec."""

    @abstractmethod
    def _feed(self, layer: FamilyLayer, following: Linear | None) -> None:
        """Tell the layer's products which products read their results; the last one's is `following`. See Linear.feed.

        None: the head, which is not quantized.
        """

    @abstractmethod
    def _finish_layer(
        self, layer: FamilyLayer, residual: torch.Tensor, attended: Rows, next_norm: torch.Tensor
    ) -> Normed:
        """Add what the layer computes of `attended` to `residual`, in place. -> the norm of the sum by `next_norm`."""

    def _mix(
        self,
        layer: FamilyLayer,
        x: Normed,
        angles: RopeTable,
        inputs: ForwardInputs,
        cache: LayerCache,
        tail: Tail | None,
    ) -> Rows:
        """The layer's first product with `x`, mixed; see Mixer."""
        return layer.attention(layer.qkv(x), angles, inputs, cache, tail)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual before the first layer."""
        return F.embedding(token_ids, self._embedding)

    def _hidden(self, inputs: ForwardInputs, caches: Mapping[int, LayerCache]) -> Normed:
        """Compute all layers and the final norm: [R, hidden_size] for the tail's rows, [T, hidden_size] without a tail.

        `Model.forward` describes the arguments.
        """
        last = self._layers[-1]
        # before an ordinary launch: see triton_dependent_launch
        of_rope = [table.at(inputs.positions) for table in self._ropes]
        angles = [of_rope[rope] for rope in self._rope_of_group]
        residual = self._embed(inputs.token_ids)
        x: Normed = self._kernels.rms_norm(residual, self._layers[0].input_norm, self.spec.norm_eps)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            tail = inputs.tail if layer is last else None
            attended = self._mix(layer, x, angles[layer.attention.group], inputs, caches[index], tail)
            if tail is not None:
                residual = residual[tail.rows]
                if self.adapters is not None and self.adapters.rows is not None:
                    self.adapters.rows = self.adapters.rows.tail
                if not len(residual):
                    return residual
            x = self._finish_layer(layer, residual, attended, next_norm)
        return x

    def logits(self, hidden: Normed) -> torch.Tensor:
        """Multiply `hidden` [R, hidden_size] with the head. -> logits as those of `Model.forward`."""
        if isinstance(hidden, torch.Tensor) and not len(hidden):  # chunks in the middle of prompts
            return hidden.new_empty(0, self._num_logits)
        logits = self._head(hidden)
        padding = self._num_logits - len(self.head_ids)
        return F.pad(logits, (0, padding), value=-torch.inf) if padding else logits

    def forward(self, inputs: ForwardInputs, caches: Mapping[int, LayerCache]) -> torch.Tensor:
        """See Model."""
        return self.logits(self._hidden(inputs, caches))

    def hidden_states(self, inputs: ForwardInputs, caches: Mapping[int, LayerCache]) -> torch.Tensor:
        """See Model."""
        hidden = self._hidden(inputs, caches)
        hidden = hidden.normed() if isinstance(hidden, HalfNormed) else hidden
        assert isinstance(hidden, torch.Tensor), "the last norm feeds the head, which is not quantized"
        return hidden

    def finish_loading(self) -> None:
        """See Model."""
        self._parameters.finish()
        self._use_few_rows()  # before the weights are put into another layout
        for kind, linears in self._linears.items():
            for linear in linears:
                linear.pack(keep_weight=kind == "head" and self.spec.tied_embeddings)

    def choose_products(
        self, decodes: Sequence[int], prompts: Sequence[int], propose: ProposeProducts, measure: Measure
    ) -> int:
        """See Model."""

        def add_norm(product: torch.Tensor, residual: torch.Tensor) -> object:
            return self._kernels.add_rms_norm(product, residual, self._norm, self.spec.norm_eps)

        return sum(
            LinearGroup(linears, add_norm).choose((*decodes, *(() if kind == "head" else prompts)), propose, measure)
            for kind, linears in self._linears.items()
        )

    def _make_qkv(self, name: str) -> Linear:
        """Make the product for queries, keys and values: [(H + 2 G) * head_dim, hidden], heads of this rank."""
        parts = {f"{name}.q_proj": self._queries, f"{name}.k_proj": self._keys, f"{name}.v_proj": self._keys}
        return self._parameters.linear("qkv", parts, self.spec.hidden_size, bias=self.spec.qkv_bias)

    def _make_attention(self, name: str, layer: int) -> PagedAttention:
        spec, norms, kernels = self.spec, None, self._kernels
        if spec.qk_norm:
            norms = HeadNorms(
                self._make_head_norm(f"{name}.q_norm", self._queries),
                self._make_head_norm(f"{name}.k_norm", self._keys),
                spec.norm_eps,
            )
        if spec.norms_heads_together and self._share.reduce is not None:
            over_ranks = HeadNormsOverRanks(kernels.norm_rope_write, self._share.reduce, self._share.shard.size)
            kernels = replace(kernels, norm_rope_write=over_ranks)
        group = spec.group_windows.index(spec.windows[layer])
        return PagedAttention(kernels, spec.head_dim, group, spec.attention_scale, norms)

    def _make_head_norm(self, name: str, heads: Cut) -> torch.Tensor:
        """Make the weight of one norm in HeadNorms."""
        size = self.spec.head_dim
        if not self.spec.norms_heads_together:
            return self._parameters.norm(f"{name}.weight", size)
        return self._parameters.norm(f"{name}.weight", heads).view(-1, size)

    def _make_gate_up(self, name: str, activate: Callable[[torch.Tensor], torch.Tensor]) -> Linear:
        """Make the product for gates and ups: [2 * intermediate, hidden]. `activate` makes [T, intermediate] of it."""
        parts = {f"{name}.{part}_proj": self._activations for part in ("gate", "up")}
        return self._parameters.linear(
            "gate_up", parts, self.spec.hidden_size, bias=self.spec.mlp_bias, activate=activate
        )

    @property
    def _activations(self) -> Cut:
        """This rank's activations of a dense feed-forward."""
        return self._share.shard.cut(self.spec.intermediate_size, "activations of a feed-forward")

    @property
    def _linears(self) -> dict[str, list[Linear]]:
        """The linears by kind, in the order in which a step uses them."""
        return dict(sorted(self._parameters.linears.items(), key=lambda item: item[0] == "head"))

    def _use_few_rows(self) -> None:
        """Let steps of few tokens use the kernels' products of few rows, if there is one for every weight."""
        linears = [linear for linears in self._linears.values() for linear in linears]
        products = []
        for linear in linears:
            product = linear.few_rows_product()
            if product is None:
                return
            products.append(product)
        max_rows = min(product.max_rows for product in products)
        for linear, product in zip(linears, products, strict=True):
            linear.use_few_rows(product, max_rows)
