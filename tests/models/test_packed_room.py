"""The memory of packed experts: what a kernel asks for is allocated, filled like any other, and estimated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pd_cluster.models.registry import build_model, resolve_spec
from pd_cluster.models.weights import fill_at_random
from pd_kernels.backends import TORCH
from tests.models.recorded_model import SHAPES

if TYPE_CHECKING:
    from pd_cluster.models.spec import ModelSpec
    from pd_kernels.backends import Kernels


def packed(spec: ModelSpec, kernels: Kernels) -> dict[str, torch.Tensor]:
    model = build_model(spec, kernels, 128, torch.float32, torch.device("cpu"))
    fill_at_random(model, seed=1)
    found = {name: slot.tensor for name, slot in model.slots.items() if slot.tensor.dtype is torch.uint8}
    model.finish_loading()
    return found


def test_experts_have_the_room_that_a_kernel_asks_for_and_the_estimate_counts() -> None:
    spec = resolve_spec(Path(), SHAPES["gpt-oss"])
    assert spec.experts is not None
    usual = packed(spec, TORCH)
    roomy = packed(spec, replace(TORCH, needs_room=lambda form, dtype, device: form.name == "mxfp4"))
    assert usual.keys() == roomy.keys()
    assert len(usual) == 4 * spec.num_layers
    assert all(torch.equal(usual[name], roomy[name]) for name in usual)
    sizes = [sum(one.untyped_storage().nbytes() for one in found.values()) for found in (usual, roomy)]
    assert sizes[0] == sum(one.nbytes for one in usual.values())
    without = replace(spec, experts=replace(spec.experts, form="", num_experts=0))
    assert sizes[1] == spec.weight_bytes(2) - without.weight_bytes(2) > sizes[0]
