"""A model that transformers' modules compute over the paged cache: right for many architectures, not fast."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch.nn.functional as F

from pd_cluster.models.slot import Slot
from pd_cluster.models.transformers_modules import make_modules, run_body, run_head, run_modules
from pd_cluster.models.transformers_spec import parse_config
from pd_kernels.latent import LatentPlan
from pd_kernels.reference import prefill_attention
from pd_kernels.torch_ops import write_cache
from pd_kernels.values import KeysValues

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from pd_cluster.models.forward_inputs import ForwardInputs
    from pd_cluster.models.mixer import LayerCache
    from pd_cluster.models.spec import ModelSpec
    from pd_cluster.models.transformers_modules import Attend, LayerCall
    from pd_kernels.gemm_selection import Measure, ProposeProducts


class TransformersModel:
    """A Model. Without `directory`, the weights are filled by `slots`. Raises StartupError if they do not fit."""

    def __init__(self, spec: ModelSpec, directory: Path | None, dtype: torch.dtype, device: torch.device) -> None:
        assert spec.modules is not None
        self.spec, self.head_ids = spec, range(spec.vocab_size)
        self.dtype, self.device, self.adapters = dtype, device, None
        # A property of a frozen spec is computed at each read: with 64 layers 0.5 ms a step
        self._group_of = {window: group for group, window in enumerate(spec.group_windows)}
        # Under a device, transformers reads weights only with the package accelerate
        with device if directory is None else nullcontext():
            self._module = make_modules(parse_config(json.loads(spec.modules.config)), dtype, directory).to(device)

    @property
    def slots(self) -> dict[str, Slot]:
        """See Model. The names are those of the modules, so only dummy weights can fill the slots."""
        return {name: Slot(weight, tuple(weight.shape)) for name, weight in self._module.named_parameters()}

    def finish_loading(self) -> None:
        """See Model. There is nothing to prepare."""

    def choose_products(
        self, decodes: Sequence[int], prompts: Sequence[int], propose: ProposeProducts, measure: Measure
    ) -> int:
        """See Model. The products of the modules stay as they are."""
        return 0

    def forward(self, inputs: ForwardInputs, caches: Mapping[int, LayerCache]) -> torch.Tensor:
        """See Model."""
        rows = 0 if inputs.tail is None else inputs.tail.rows
        return run_modules(self._module, inputs.token_ids, inputs.positions, rows, self._attention(inputs, caches))

    def hidden_states(self, inputs: ForwardInputs, caches: Mapping[int, LayerCache]) -> torch.Tensor:
        """See Model."""
        attend = self._attention(inputs, caches)
        return run_body(self._module, inputs.token_ids, inputs.positions, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return run_head(self._module, hidden)

    def _attention(self, inputs: ForwardInputs, caches: Mapping[int, LayerCache]) -> Attend:
        def attend(call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            views, width = caches[call.layer], value.shape[-1]
            assert isinstance(views, KeysValues)
            group = self._group_of[call.window]
            query, key, value = (_as_cached(part, views.keys) for part in (query, key, value))
            write_cache(key, value, views, inputs.slot_mappings[group])
            if call.soft_cap or call.sinks is not None:
                assert inputs.sequences is not None, "steps of transformers' modules are not captured"
                packed = inputs.sequences[group]
                places = packed.block_tables, packed.query_starts, packed.seq_lens
                out = prefill_attention(query, views, *places, call.scale, call.window, call.soft_cap, call.sinks)
            else:
                plan = inputs.plans[group]
                assert not isinstance(plan, LatentPlan)
                out = plan.run(query, views, call.scale)
            return out[..., :width]

        return attend


def _as_cached(part: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Pad heads with zeros to the cache's width: latent attention has narrower values than keys."""
    return F.pad(part, (0, view.shape[-1] - part.shape[-1])).to(view.dtype).contiguous()
