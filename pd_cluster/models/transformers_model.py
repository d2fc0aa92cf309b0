"""A model that transformers' modules compute over the paged cache: right for many architectures, not fast."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from pd_cluster.errors import StartupError
from pd_cluster.models.slot import Slot
from pd_cluster.models.tensor_names import is_ignored
from pd_cluster.models.transformers_attention import ATTENTION, OwnValues, PagedStep
from pd_cluster.models.transformers_spec import make_modules, parse_config, prepare, run_modules

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pd_cluster.models.forward_inputs import ForwardInputs
    from pd_cluster.models.spec import ModelSpec
    from pd_kernels.gemm_selection import Measure, ProposeProducts

_TOKENS = 8  # that are tried in another order
_MOST_ROUNDINGS = 32  # between equal logits of another order, relative to them: 0.25 in bfloat16, 4e-6 in float32


class TransformersModel:
    """A Model."""

    def __init__(self, spec: ModelSpec, directory: Path | None, dtype: torch.dtype, device: torch.device) -> None:
        """`directory`: of the weights; None: they are filled by `slots`.

        Raises StartupError when the weights do not fit the config.
        """
        assert spec.modules is not None
        self.spec = spec
        self.dtype, self.device = dtype, device
        config = parse_config(json.loads(spec.modules.config))
        if directory is None:
            with device:
                self._module = make_modules(config, dtype)
        else:
            self._module = prepare(_load(config, directory, dtype).to(device))

    @property
    def slots(self) -> dict[str, Slot]:
        """See Model. The names are those of the modules, so only dummy weights can fill the slots."""
        return {name: Slot(weight, tuple(weight.shape)) for name, weight in self._module.named_parameters()}

    def finish_loading(self) -> None:
        """See Model. Raises StartupError when the modules mix tokens outside of attention.

        They would mix those of different sequences, which a step holds side by side. Where each token attends to
        itself only, another order of tokens must give the same logits in that order. Half of the tokens may differ,
        because rounding may choose other experts.
        """
        tokens = torch.arange(_TOKENS, device=self.device) * 7919 % self.spec.vocab_size
        order = torch.arange(_TOKENS, device=self.device) * 3 % _TOKENS
        positions = torch.arange(_TOKENS, device=self.device)
        first = run_modules(self._module, tokens[None], positions[None], 0, OwnValues()).float()
        second = run_modules(self._module, tokens[order][None], positions[order][None], 0, OwnValues()).float()
        difference = (second - first[order]).norm(dim=-1) / first[order].norm(dim=-1)
        if not difference.median() < _MOST_ROUNDINGS * torch.finfo(self.dtype).eps:
            raise StartupError(
                f"{self.spec.architecture} cannot be served: its modules mix tokens outside of attention"
            )

    def choose_products(
        self, decodes: Sequence[int], prompts: Sequence[int], propose: ProposeProducts, measure: Measure
    ) -> int:
        """See Model. The products of foreign modules stay as they are."""
        return 0

    def forward(self, inputs: ForwardInputs, layer_views: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """See Model."""
        step = PagedStep(inputs, layer_views, self.spec.group_windows)
        rows = 0 if inputs.tail is None else inputs.tail.rows
        return run_modules(self._module, inputs.token_ids[None], inputs.positions[None], rows, step)


def _load(config: Any, directory: Path, dtype: torch.dtype) -> Any:
    """The modules with their weights, on CPU. Raises StartupError naming tensors that are missing or unknown.

    transformers reads the files, because it fuses and renames the tensors of many families (experts among them).
    """
    logging.disable_progress_bar()  # which is no line of a log
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True,
            use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # the modules are foreign and may raise anything
        raise StartupError(f"transformers cannot load the weights in {directory}: {error}") from error
    unknown = {name for name in report["unexpected_keys"] if not is_ignored(name)}
    problems = {"missing": report["missing_keys"], "unknown": unknown, "of another shape": report["mismatched_keys"]}
    if named := [f"{kind}: {sorted(map(str, names))[:5]}" for kind, names in problems.items() if names]:
        raise StartupError(f"the weights in {directory} do not fit its config.json; {'; '.join(named)}")
    return module
