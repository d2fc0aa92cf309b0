"""The interface of mixtures of experts with biases and a clamped SwiGLU (gpt-oss, arXiv 2508.10925)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union

if TYPE_CHECKING:
    import torch

    from pd_kernels.values import ExpertPart, HalfNormed
    from pd_kernels.weight_forms import PackedWeight

ExpertsWeight: TypeAlias = Union["torch.Tensor", "PackedWeight"]  # [E, out, in]


@dataclass(frozen=True, slots=True)
class BiasedExperts:
    """The weights of a layer's experts as the checkpoint has them, E of this rank. Biases have the model's dtype.

    Rows of gates and ups alternate: row 2 i of `gate_up` is the gate of activation i, row 2 i + 1 its up.
    Activation = (up + 1) * gate * sigmoid(alpha * gate), of gates of at most `limit` and ups within +-`limit`.
    """

    gate_up: ExpertsWeight  # [E, 2 * size, hidden]
    gate_up_bias: torch.Tensor  # [E, 2 * size]
    down: ExpertsWeight  # [E, hidden, size]
    down_bias: torch.Tensor  # [E, hidden]
    limit: float
    alpha: float


class BiasedMix(Protocol):
    """The work of one layer's chosen experts; see `reference.biased_experts`."""

    def __call__(self, x: torch.Tensor | HalfNormed, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """`x` [T, hidden], `scores` float32 and `chosen` int64 [T, k] -> [T, hidden] of the dtype of `x`.

        Without a part the sum may be left to `add_rms_norm`: then the result is float32 parts [parts, T, hidden].
        """


class MakeBiasedMix(Protocol):
    """Makes the BiasedMix of a layer, once, when its weights are loaded.

    It may put the weights into another layout, in place where they have room: the caller drops its own. `part`: see
    ExpertPart; None: all experts.
    """

    def __call__(self, weights: BiasedExperts, part: ExpertPart | None) -> BiasedMix: ...
