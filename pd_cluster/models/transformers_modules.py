"""transformers' modules with an attention of ours.

A module finds its attention by name, and hands it the keyword arguments of the model's forward. One of these, `attend`,
computes the attention of that forward. So the function that has the name keeps no state, and models of one process
share nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging

from pd_cluster.errors import StartupError, UnservedModel
from pd_cluster.models.tensor_names import is_ignored

if TYPE_CHECKING:
    from pathlib import Path

_ATTENTION = "pd_cluster"  # modules make no mask for an attention that has a name of its own
_SETTINGS = frozenset(
    {"attend", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
    | {"dropout", "position_ids", "use_cache", "output_attentions", "output_router_logits"}  # which change nothing here
)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The settings of one layer's attention."""

    layer: int
    scale: float  # factor on the scores
    window: int  # tokens that a query sees; 0: all
    soft_cap: float  # see reference.attend; 0: none
    sinks: torch.Tensor | None  # [H], see reference.attend


Attend = Callable[[LayerCall, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of T tokens: (call, query [T, H, D], key [T, G, D], value [T, G, E]) -> [T, H, E]."""


def make_modules(parsed: Any, dtype: torch.dtype, directory: Path | None = None) -> Any:
    """Make the modules of a config for inference. `directory`: of their weights, which are read onto the CPU.

    Without it they are on torch's default device, with weights of any value. Raises StartupError naming tensors that
    are missing or unknown.
    """
    if directory is None:
        module = AutoModelForCausalLM.from_config(parsed, attn_implementation=_ATTENTION, dtype=dtype)
    else:
        module = _load(parsed, dtype, directory)
    for part in module.modules():
        # Else each step chooses by its longest sequence. The model is served up to the length that has these only
        if getattr(part, "rope_type", None) == "longrope":
            part.rope_type = "default"
        # Else GPT-2 looks for padding in the tokens of each step, which have no values in a probe
        if hasattr(part, "warn_if_padding_and_no_attention_mask"):
            part.warn_if_padding_and_no_attention_mask = lambda *tensors: None
    return module.eval().requires_grad_(False)


def run_modules(
    module: Any, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | int, attend: Attend
) -> torch.Tensor:
    """Logits [R, vocab_size] of `rows` (int64 [R]; 0: all T). `token_ids`, `positions`: int64 [T]."""
    found = module(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows, attend=attend
    )
    logits: torch.Tensor = found.logits[0]
    return logits


def run_body(module: Any, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
    """The states in front of the head, [T, hidden_size]. The arguments are those of `run_modules`."""
    found = module.base_model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, attend=attend)
    hidden: torch.Tensor = found[0][0]
    return hidden


class _BodyOutput(tuple[torch.Tensor]):
    """The states of a body, as all families read them from its output. Nothing else is in it."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def run_head(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [R, vocab_size] of `hidden` [R, hidden_size], by all that a family does after its body."""
    body = module.base_model
    body.forward = lambda *_, **__: _BodyOutput((hidden[None],))  # in place of the class's
    try:
        found = module(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.int64), use_cache=False)
    finally:
        del body.forward
    logits: torch.Tensor = found.logits[0]
    return logits


def _load(parsed: Any, dtype: torch.dtype, directory: Path) -> Any:
    """transformers reads the files, because it fuses and renames tensors of many families (experts among them)."""
    logging.disable_progress_bar()  # which is no line of a log
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            directory, config=parsed, dtype=dtype, attn_implementation=_ATTENTION, local_files_only=True,
            use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # the modules are foreign and may raise anything
        raise StartupError(f"transformers cannot load the weights in {directory}: {error}") from error
    unknown = {name for name in report["unexpected_keys"] if not is_ignored(name)}
    problems = {"missing": report["missing_keys"], "unknown": unknown, "of another shape": report["mismatched_keys"]}
    if named := [f"{kind}: {sorted(map(str, names))[:5]}" for kind, names in problems.items() if names]:
        raise StartupError(f"the weights in {directory} do not fit its config.json; {'; '.join(named)}")
    return module


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: object, **settings: Any
) -> tuple[torch.Tensor, None]:
    """`query` [1, H, T, D], `key` [1, G, T, D], `value` [1, G, T, E] of this step -> [1, T, H, E]."""
    given = {name: setting for name, setting in settings.items() if setting is not None}
    asked = [name for name in given if name not in _SETTINGS]
    asked += ["a mask of its own"] * (attention_mask is not None)
    asked += ["attention to later tokens"] * (not given.get("is_causal", getattr(module, "is_causal", True)))
    asked += ["attention that no argument of the model reaches"] * ("attend" not in given)
    if asked:
        raise UnservedModel(f"{type(module).__name__} asks for {', '.join(asked)}")
    scale, window = float(given.get("scaling", query.shape[-1] ** -0.5)), int(given.get("sliding_window", 0))
    call = LayerCall(module.layer_idx, scale, window, float(given.get("softcap", 0.0)), given.get("s_aux"))
    return given["attend"](call, *(part[0].transpose(0, 1) for part in (query, key, value)))[None], None


AttentionInterface.register(_ATTENTION, _attend)
