"""The base class of all model families: embedding and head, the end of loading, the choice of products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from pd_cluster.models.linear_group import LinearGroup
from pd_cluster.models.paged_attention import PagedAttention
from pd_cluster.models.parameters import Parameters
from pd_kernels.values import HeadNorms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.models.forward_inputs import ForwardInputs
    from pd_cluster.models.linear import Linear, Normed
    from pd_cluster.models.slot import Slot
    from pd_cluster.models.spec import ModelSpec
    from pd_kernels.backends import Kernels
    from pd_kernels.gemm_selection import Measure, ProposeProducts


class Layer(Protocol):
    """The weights of one layer. A family declares its own fields, and `input_norm` for the layer's first norm."""

    @property
    def input_norm(self) -> torch.Tensor:
        """The weight of the first norm, [hidden_size]."""


FamilyLayer = TypeVar("FamilyLayer", bound=Layer)


class Decoder(ABC, Generic[FamilyLayer]):
    """A Model. A family makes one layer in `_make_layer`, and computes all layers in `hidden`."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        *,
        offset_norms: bool = False,
    ) -> None:
        """`offset_norms`: see Parameters."""
        self.spec = spec
        self.dtype, self.device = dtype, device
        self._kernels = kernels
        self._parameters = Parameters(kernels, dtype, device, offset_norms=offset_norms, quantization=spec.quantization)
        # Weights are allocated in the order in which a step reads them
        self._embedding = self._parameters.tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._layers = [self._make_layer(f"model.layers.{index}", index) for index in range(spec.num_layers)]
        self._norm = self._parameters.norm("model.norm.weight", spec.hidden_size)
        if spec.tied_embeddings:
            self._head = self._parameters.tied_linear("head", self._embedding)
        else:
            self._head = self._parameters.linear("head", {"lm_head": spec.vocab_size}, spec.hidden_size)
        self._next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._norm]

    @property
    def slots(self) -> dict[str, Slot]:
        """See Model."""
        return self._parameters.slots

    @abstractmethod
    def _make_layer(self, name: str, index: int) -> FamilyLayer:
        """Make the layer `name` of the checkpoint, which is the layer `index` of the spec."""

    @abstractmethod
    def hidden(self, inputs: ForwardInputs, layer_views: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Normed:
        """Compute all layers and the final norm: [R, hidden_size] for the tail's rows, [T, hidden_size] without a tail.

        `Model.forward` describes the arguments.
        """

    def logits(self, hidden: Normed) -> torch.Tensor:
        """Multiply `hidden` [R, hidden_size] with the head. -> logits [R, vocab_size]."""
        if isinstance(hidden, torch.Tensor) and not len(hidden):  # chunks in the middle of prompts
            return hidden.new_empty(0, self.spec.vocab_size)
        return self._head(hidden)

    def forward(self, inputs: ForwardInputs, layer_views: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """See Model."""
        return self.logits(self.hidden(inputs, layer_views))

    def finish_loading(self) -> None:
        """See Model."""
        self._parameters.slots.clear()
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
        """Make the product for queries, keys and values: [(H + 2 G) * head_dim, hidden]."""
        query_size, key_size = self.spec.num_heads * self.spec.head_dim, self.spec.num_kv_heads * self.spec.head_dim
        parts = {f"{name}.q_proj": query_size, f"{name}.k_proj": key_size, f"{name}.v_proj": key_size}
        return self._parameters.linear("qkv", parts, self.spec.hidden_size, bias=self.spec.qkv_bias)

    def _make_attention(self, name: str, layer: int) -> PagedAttention:
        spec, norms = self.spec, None
        if spec.qk_norm:
            query, key = (self._parameters.norm(f"{name}.{part}_norm.weight", spec.head_dim) for part in ("q", "k"))
            norms = HeadNorms(query, key, spec.norm_eps)
        group = spec.group_windows.index(spec.windows[layer])
        return PagedAttention(self._kernels, spec.head_dim, group, spec.attention_scale, norms)

    def _make_gate_up(self, name: str, activate: Callable[[torch.Tensor], torch.Tensor]) -> Linear:
        """Make the product for gates and ups: [2 * intermediate, hidden]. `activate` makes [T, intermediate] of it."""
        parts = {f"{name}.{part}_proj": self.spec.intermediate_size for part in ("gate", "up")}
        return self._parameters.linear(
            "gate_up", parts, self.spec.hidden_size, bias=self.spec.mlp_bias, activate=activate
        )

    @property
    def _linears(self) -> dict[str, list[Linear]]:
        """The linears by kind, in the order in which a step uses them."""
        return dict(sorted(self._parameters.linears.items(), key=lambda item: item[0] == "head"))

    def _use_few_rows(self) -> None:
        """Let steps of few tokens use the kernels' products of few rows, if there is one for every weight.

        There is none for experts.
        """
        if self.spec.experts is not None:
            return
        *of_layers, head = self._linears.values()  # a kind has a linear in each layer
        linears = [*(linear for layer in zip(*of_layers, strict=True) for linear in layer), *head]
        products = []
        for linear in linears:
            product = linear.few_rows_product()
            if product is None:
                return
            products.append(product)
        max_rows = min(product.max_rows for product in products)
        for linear, product in zip(linears, products, strict=True):
            linear.use_few_rows(product, max_rows)
