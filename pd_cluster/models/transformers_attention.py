"""Attention of transformers' modules over the paged cache.

A module finds its attention by name in transformers' AttentionInterface, and hands it the keyword arguments of the
model's forward. One of them is the step. So the function that is registered has no state, and two models of one process
share nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch.nn.functional as F
from transformers import AttentionInterface

from pd_cluster.errors import StartupError
from pd_kernels.sink_attention import attend_with_sinks
from pd_kernels.torch_ops import write_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pd_cluster.models.forward_inputs import ForwardInputs

ATTENTION = "pd_cluster"  # the name in AttentionInterface; no mask is made for a name that has no mask function
_WITHOUT_MEANING = frozenset(
    {"dropout", "position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"}
)  # arguments that change nothing, because positions are in the keys already, and nothing is trained


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The settings of one layer's attention."""

    layer: int
    scale: float  # factor on the scores
    window: int  # tokens that a query sees; 0: all
    soft_cap: float  # 0: none
    sinks: torch.Tensor | None  # [H]


class AttentionStep(Protocol):
    """The `step` that a model's forward takes as a keyword argument."""

    def attend(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with T tokens: `query` [T, H, D], `key` [T, G, D], `value` [T, G, E]. -> [T, H, E]."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step over the cache."""

    inputs: ForwardInputs
    views: Sequence[tuple[torch.Tensor, torch.Tensor]]  # K and V by layer, see Model.forward
    windows: tuple[int, ...]  # by KV group

    def attend(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See AttentionStep. Keys and values that are narrower than the cache are padded with zeros."""
        views = self.views[call.layer]
        width = value.shape[-1]
        query, key, value = (_as_cached(part, views[0]) for part in (query, key, value))
        write_cache(key, value, *views, self.inputs.slot_mapping)
        if call.soft_cap or call.sinks is not None:
            assert self.inputs.sequences is not None, "steps of transformers' modules are not captured"
            attended = attend_with_sinks(
                query, *views, self.inputs.sequences, call.scale, call.window, call.soft_cap, call.sinks
            )
        else:
            attended = self.inputs.plans[self.windows.index(call.window)].run(query, *views, call.scale)
        return attended[..., :width]


@dataclass(frozen=True, slots=True)
class OwnValues:
    """A step in which each token sees its own value only."""

    def attend(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See AttentionStep."""
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def _as_cached(part: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    return F.pad(part, (0, view.shape[-1] - part.shape[-1])).to(view.dtype).contiguous()


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    step: AttentionStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: `query` [1, H, T, D], `key` [1, G, T, D], `value` [1, G, T, E] of this step.

    -> [1, T, H, E]. Raises StartupError for a layer that asks for something else than causal attention.
    """
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _WITHOUT_MEANING)
    if attention_mask is not None:
        unknown.append("a mask of its own")
    if is_causal is False or not getattr(module, "is_causal", True):
        unknown.append("attention to later tokens")
    if step is None or unknown:
        asked = ", ".join(unknown) or "attention that no argument of the model reaches"
        raise StartupError(f"{type(module).__name__} asks for {asked}")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = LayerCall(module.layer_idx, scale, int(sliding_window or 0), float(softcap or 0.0), s_aux)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    return step.attend(call, query, key, value)[None], None


AttentionInterface.register(ATTENTION, _attend)
