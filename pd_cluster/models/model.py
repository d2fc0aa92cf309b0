"""The interface between a worker and a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pd_cluster.models.adapter_slots import AdapterSlots
    from pd_cluster.models.forward_inputs import ForwardInputs
    from pd_cluster.models.mixer import LayerCache
    from pd_cluster.models.model_share import ModelShare
    from pd_cluster.models.slot import Slot
    from pd_cluster.models.spec import ModelSpec
    from pd_kernels.backends import Kernels
    from pd_kernels.gemm_selection import Measure, ProposeProducts


class Model(Protocol):
    """Weights and forward pass of one model on one device."""

    @property
    def spec(self) -> ModelSpec:
        """The whole model, of which this may be one rank's part."""

    @property
    def head_ids(self) -> range:
        """The token ids of the logits that this rank computes. One rank computes those of the whole vocabulary."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def adapters(self) -> AdapterSlots | None:
        """None: the model has no room for adapters."""

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

    def forward(self, inputs: ForwardInputs, caches: Mapping[int, LayerCache]) -> torch.Tensor:
        """Logits of the tail's rows, or of all T. Writes the step's keys and values into the cache.

        The logits are [R, vocab_size]. On one of several ranks they are [R, ceil(vocab_size / size)]: those of
        `head_ids`, and -inf after them. `caches`: by layer, for the layers of the KV groups.
        """

    def hidden_states(self, inputs: ForwardInputs, caches: Mapping[int, LayerCache]) -> torch.Tensor:
        """The part of `forward` before the head: the states after the last norm, [R, hidden_size] on every rank."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rest of `forward`, for rows of `hidden_states` [R, hidden_size]."""


class BuildModel(Protocol):
    """Allocates a rank's share of a model for sequences of up to `max_len` tokens."""

    def __call__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        share: ModelShare,
    ) -> Model: ...
