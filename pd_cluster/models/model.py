"""The interface between a worker and a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pd_cluster.models.forward_inputs import ForwardInputs
    from pd_cluster.models.slot import Slot
    from pd_cluster.models.spec import ModelSpec
    from pd_kernels.backends import Kernels
    from pd_kernels.gemm_selection import Measure, ProposeProducts


class Model(Protocol):
    """Weights and forward pass of one model on one device."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def slots(self) -> Mapping[str, Slot]:
        """The slot of each tensor of the checkpoint, by the tensor's name. Fill each once, before `finish_loading`."""

    def finish_loading(self) -> None:
        """Prepare the weights for use, after all slots are filled. The slots must not be used afterwards."""

    def choose_products(
        self, decodes: Sequence[int], prompts: Sequence[int], propose: ProposeProducts, measure: Measure
    ) -> int:
        """Measure the proposed products and use the fastest. Returns how many of those in use are not torch's.

        `decodes`: sizes of steps of decodes, all rows of which sample. `prompts`: sizes of steps with prompts, few rows
        of which sample. Raises RuntimeError when the device fails.
        """

    def forward(self, inputs: ForwardInputs, layer_views: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Logits [R, vocab_size] of the tail's rows, or of all T. Writes the step's keys and values into the cache.

        `layer_views`: by layer, the cache's K and V views, [num_blocks, num_kv_heads, block_size, head_dim] each.
        """


class BuildModel(Protocol):
    """Allocates a model for sequences of up to `max_len` tokens."""

    def __call__(
        self, spec: ModelSpec, kernels: Kernels, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> Model: ...
