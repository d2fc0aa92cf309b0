"""The attention backends in the order of preference, and the choice of one for a group of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_kernels.hopper_attention import HopperBackend
from pd_kernels.latent_backend import TritonLatentBackend
from pd_kernels.torch_attention import TorchBackend
from pd_kernels.torch_latent import TorchLatentBackend
from pd_kernels.triton_attention import TritonBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pd_kernels.attention import AttentionBackend, AttentionShape

ANY = "auto"
ATTENTION_BACKENDS: tuple[AttentionBackend, ...] = (
    HopperBackend(), TritonBackend(), TorchBackend(), TritonLatentBackend(), TorchLatentBackend(),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The backend of a group: the first one that can serve the group."""

    backend: AttentionBackend
    refusals: Mapping[str, str]  # name -> reason, of the backends before it

    def __str__(self) -> str:
        """For example `triton (hopper: has no windows)`."""
        return f"{self.backend.name} ({_text(self.refusals)})" if self.refusals else self.backend.name


def choose_attention(shape: AttentionShape, device: torch.device, wanted: str = ANY) -> AttentionChoice:
    """Choose the backend of a group. `wanted`: the name of the only backend to ask, or ANY.

    Raises ValueError with the reasons when no backend that was asked can serve the group, or none has the name
    `wanted`.
    """
    refusals: dict[str, str] = {}
    for backend in ATTENTION_BACKENDS:
        if wanted in (ANY, backend.name):
            reason = backend.why_not(shape, device)
            if not reason:
                return AttentionChoice(backend, refusals)
            refusals[backend.name] = reason
    names = ", ".join(backend.name for backend in ATTENTION_BACKENDS)
    raise ValueError(refusals.get(wanted) or _text(refusals) or f"there is no such backend; there are {names}")


def _text(refusals: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
