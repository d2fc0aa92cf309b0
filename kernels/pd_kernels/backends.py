"""The table of all kernels except attention: one row of functions per implementation, and torch's row.

To add a backend, add a row: a `Kernels` with its own functions, and the others from `TORCH` by `replace`.
`selection.py` maps devices to rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pd_kernels import lora, sampling, torch_experts, torch_ops, torch_quantized, torch_state
from pd_kernels.logprobs import logprobs
from pd_kernels.torch_biased_experts import TorchBiasedMix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pd_kernels.biased_experts import MakeBiasedMix
    from pd_kernels.gemm_selection import Product
    from pd_kernels.lora import AdapterMatrices, AdapterRows
    from pd_kernels.quantized import QuantizedRows, QuantizedWeight, RowsTwice, Weight
    from pd_kernels.state import StateOps
    from pd_kernels.values import Draws, ExpertPart, HalfNormed, KeysValues, NewTokens, Routing
    from pd_kernels.weight_forms import WeightForm


class NormRopeWrite(Protocol):
    """The work between the QKV product and attention: norms, RoPE and the write to the cache.

    `reference.norm_rope_write` defines the arguments and the result.
    """

    def __call__(self, heads: torch.Tensor, new: NewTokens, cache: KeysValues) -> torch.Tensor: ...


class FewRows(Protocol):
    """The product of at most `max_rows` rows with one weight W and bias b, fused with the work before and after it."""

    @property
    def max_rows(self) -> int: ...

    def __call__(self, x: torch.Tensor | HalfNormed) -> torch.Tensor:
        """`x` [T, in] -> x W^T + b [T, out], or for a gated weight silu_and_mul of that, [T, out / 2].

        For a HalfNormed the product also divides each row by its root mean square.
        """

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, eps: float) -> HalfNormed:
        """Add x W^T + b to `residual` [T, out] in place. Returns the norm of the sum, with the weight `norm` [out]."""


class MakeFewRows(Protocol):
    """Makes the FewRows of a weight [out, in] and its bias. Returns None if the kernels do not support them.

    `gated`: the weight is [gate | up] along its rows.
    """

    def __call__(self, weight: Weight, bias: torch.Tensor | None, gated: bool) -> FewRows | None: ...


class ProposeGated(Protocol):
    """Proposes products that also compute silu_and_mul of x weight^T, for `num_rows` rows and more.

    `weight` [N, K] has the gates, then the ups. The caller measures whether the products are faster.
    """

    def __call__(self, num_rows: int, weight: torch.Tensor) -> Sequence[Product]: ...


class RouteTokens(Protocol):
    """The choice of experts; see `reference.route`. For a HalfNormed the choice is that of the divided rows."""

    def __call__(
        self, x: torch.Tensor | HalfNormed, router: torch.Tensor, bias: torch.Tensor | None, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class MixExperts(Protocol):
    """The work of the chosen experts; see `reference.experts`. For a HalfNormed it is that of the divided rows.

    With `part` the result is [T, in], one rank's part of the sum, for the experts that its weights are of.

    A kernel may leave the sum to `add_rms_norm`: then it returns float32 parts [parts, T, in].
    """

    def __call__(
        self,
        x: torch.Tensor | HalfNormed | RowsTwice,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        *,
        part: ExpertPart | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of every function except attention.

    `reference`, `sampling` and `logprobs` define the functions.
    """

    name: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    few_rows: MakeFewRows
    gated_products: ProposeGated
    quantize: Callable[[torch.Tensor, int], QuantizedRows]
    add_rms_norm_quantized: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, float, int], tuple[QuantizedRows, torch.Tensor]
    ]
    add_rms_norm_twice: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, int], tuple[RowsTwice, torch.Tensor]]
    silu_and_mul_quantized: Callable[[torch.Tensor, int], QuantizedRows]
    sigmoid_and_mul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    sigmoid_and_mul_quantized: Callable[[torch.Tensor, torch.Tensor, int], QuantizedRows]
    gated_norm_quantized: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, int], QuantizedRows]
    quantized_product: Callable[[QuantizedRows, QuantizedWeight, torch.dtype], torch.Tensor]
    shrink: Callable[[torch.Tensor | HalfNormed, AdapterMatrices, AdapterRows], torch.Tensor]
    expand: Callable[[torch.Tensor, torch.Tensor, AdapterMatrices, AdapterRows, bool], torch.Tensor]
    norm_rope_write: NormRopeWrite
    route: RouteTokens
    experts: MixExperts
    captures_experts: bool  # whether steps with `experts` can be captured in CUDA graphs
    needs_room: Callable[[WeightForm, torch.dtype, torch.device], bool]  # of weights of `biased_experts`: `room`
    biased_experts: MakeBiasedMix
    captured_forms: frozenset[str]  # names of WeightForms: steps with `biased_experts` of these can be captured
    state: StateOps
    captures_state: bool  # whether steps with `state` can be captured
    copy_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    argmax: Callable[[torch.Tensor], torch.Tensor]
    draw: Callable[[torch.Tensor, Draws], torch.Tensor]
    best: Callable[[torch.Tensor, Draws | None, int], tuple[torch.Tensor, torch.Tensor]]
    logprobs: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    penalize: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def no_few_rows(weight: Weight, bias: torch.Tensor | None, gated: bool) -> None:
    """The MakeFewRows of an implementation without such a product: returns None."""


def no_gated_products(num_rows: int, weight: torch.Tensor) -> tuple[()]:
    """The ProposeGated of an implementation without such products."""
    return ()


def no_room(form: WeightForm, dtype: torch.dtype, device: torch.device) -> bool:
    """Packed weights stay as they lie on disk."""
    return False


TORCH = Kernels(
    name="torch",
    rms_norm=torch_ops.rms_norm,
    add_rms_norm=torch_ops.add_rms_norm,
    silu_and_mul=torch_ops.silu_and_mul,
    few_rows=no_few_rows,
    gated_products=no_gated_products,
    quantize=torch_quantized.quantize,
    add_rms_norm_quantized=torch_quantized.add_rms_norm_quantized,
    add_rms_norm_twice=torch_quantized.add_rms_norm_twice,
    silu_and_mul_quantized=torch_quantized.silu_and_mul_quantized,
    sigmoid_and_mul=torch_ops.sigmoid_and_mul,
    sigmoid_and_mul_quantized=torch_quantized.sigmoid_and_mul_quantized,
    gated_norm_quantized=torch_state.gated_norm_quantized,
    quantized_product=torch_quantized.quantized_product,
    shrink=lora.shrink,
    expand=lora.expand,
    norm_rope_write=torch_ops.norm_rope_write,
    route=torch_experts.route,
    experts=torch_experts.experts,
    captures_experts=False,
    needs_room=no_room,
    biased_experts=TorchBiasedMix,
    captured_forms=frozenset(),
    state=torch_state.TorchState(),
    captures_state=False,
    copy_blocks=torch_ops.copy_blocks,
    argmax=sampling.argmax,
    draw=sampling.draw,
    best=sampling.best,
    logprobs=logprobs,
    penalize=sampling.penalize,
)
