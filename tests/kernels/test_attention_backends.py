"""Which backend attends for a group of layers, and why others do not. Their sums: the tests of each."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="some backends need triton")

from pd_kernels import attention_backends
from pd_kernels.attention import AttentionShape
from pd_kernels.attention_backends import ATTENTION_BACKENDS, choose_attention
from pd_kernels.hopper_attention import HopperBackend, refusal
from pd_kernels.latent import LatentDims, LatentPlan
from pd_kernels.torch_attention import TorchAttention, TorchBackend
from pd_kernels.triton_attention import TritonBackend
from tests.kernels.paged import attention_shape, make_paged
from tests.kernels.test_triton_attention import DEVICE, REAL, TOLERANCE, on_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = AttentionShape(32, 8, 128, 64, num_layers=3, dtype=torch.bfloat16)


class Refusing(TorchBackend):
    """A backend of another kind of group."""

    name = "latent"

    def why_not(self, shape: AttentionShape, device: torch.device) -> str:
        return "" if shape.head_dim == 576 else "needs latents"


def test_a_cpu_attends_with_torch_and_the_reasons_are_told() -> None:
    choice = choose_attention(SHAPE, CPU)
    assert isinstance(choice.backend.attention(SHAPE, CPU), TorchAttention)
    assert str(choice) == "torch (hopper: needs a Hopper GPU; triton: needs a GPU)"


def test_the_first_that_serves_a_group_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    latent = Refusing()
    monkeypatch.setattr(attention_backends, "ATTENTION_BACKENDS", (latent, TorchBackend()))
    found = [choose_attention(replace(SHAPE, head_dim=head_dim), CPU) for head_dim in (128, 576)]
    assert found[0].backend == TorchBackend()
    assert found[0].refusals == {"latent": "needs latents"}
    assert found[1].backend is latent
    assert str(found[1]) == "latent"


def test_the_wanted_one_serves_or_says_why_not() -> None:
    assert choose_attention(SHAPE, CPU, "torch").refusals == {}
    with pytest.raises(ValueError, match=r"^needs a GPU$"):
        choose_attention(SHAPE, CPU, "triton")
    with pytest.raises(
        ValueError, match=r"^there is no such backend; there are hopper, triton, torch, latent-triton, latent-torch$"
    ):
        choose_attention(SHAPE, CPU, "flash")


def test_names_differ() -> None:
    assert len({backend.name for backend in ATTENTION_BACKENDS}) == len(ATTENTION_BACKENDS)


def test_each_backend_has_decided_on_each_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new field, such as a soft cap, needs a reason in every backend that does not compute it; then a row here."""
    monkeypatch.setattr("pd_kernels.hopper_attention._is_hopper", lambda device: True)
    monkeypatch.setattr(HopperBackend, "_compiler_refusal", lambda backend, shape: "")
    serving: dict[str, tuple[Any, str]] = {  # a value that is unlike that of SHAPE, and the backends that compute it
        "num_heads": (8 * 65, "torch"),
        "num_kv_heads": (16, "hopper triton torch"),
        "head_dim": (256, "triton torch"),
        "block_size": (16, "triton torch"),
        "num_layers": (1, "hopper triton torch"),
        "dtype": (torch.float32, "triton torch"),
        "window": (20, "triton torch"),
        "has_fp8_cache": (True, "hopper triton torch"),
        "has_sinks": (True, "hopper triton torch"),
        "latent": (LatentDims(64, 64, 128, 128), "latent-triton latent-torch"),
    }
    assert serving.keys() == {field.name for field in fields(AttentionShape)}
    for name, (value, names) in serving.items():
        shape = replace(SHAPE, **{name: value})
        found = [backend.name for backend in ATTENTION_BACKENDS if not backend.why_not(shape, CUDA)]
        assert found == names.split(), name


@pytest.mark.parametrize("change", [{"window": 20}, {"has_sinks": True}, {"has_fp8_cache": True}])
def test_latent_groups_are_refused_with_what_no_backend_computes(change: dict[str, Any]) -> None:
    shape = replace(SHAPE, latent=LatentDims(64, 64, 128, 128), **change)
    with pytest.raises(
        ValueError, match=r"torch: has no latent keys; .*; latent-torch: has no (windows|sinks|float8 cache)$"
    ):
        choose_attention(shape, CPU)


def test_both_groups_of_gpt_oss_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_kernels.hopper_attention._is_hopper", lambda device: True)
    monkeypatch.setattr(HopperBackend, "_compiler_refusal", lambda backend, shape: "")
    shape = AttentionShape(64, 8, 64, 64, num_layers=18, dtype=torch.bfloat16, has_sinks=True)
    assert str(choose_attention(shape, CUDA)) == "hopper"
    assert str(choose_attention(replace(shape, window=128), CUDA)) == "triton (hopper: has no windows)"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"head_dim": 64, "block_size": 128, "dtype": torch.float16}, ""),
        ({"window": 20}, "has no windows"),
        ({"has_sinks": True, "num_heads": 64, "head_dim": 64}, ""),
        ({"has_sinks": True, "window": 128}, "has no windows"),
        ({"dtype": torch.float32}, "has no float32"),
        ({"head_dim": 96}, "has no heads of 96"),
        ({"block_size": 16}, "needs blocks of a multiple of 64 tokens, not 16"),
        ({"block_size": 96}, "needs blocks of a multiple of 64 tokens, not 96"),
        ({"num_heads": 24}, "3 query heads share a KV head, which does not divide 64"),
    ],
)
def test_what_the_hopper_kernel_refuses(change: dict[str, Any], reason: str) -> None:
    assert refusal(replace(SHAPE, **change)) == reason


@pytest.mark.parametrize(
    ("num_heads", "dtype", "most"),
    [(32, torch.float32, 0), (33, torch.float32, 32), (64, torch.bfloat16, 0), (65, torch.float16, 64)],
)
def test_triton_needs_a_row_of_a_tile_for_each_head(num_heads: int, dtype: torch.dtype, most: int) -> None:
    reason = TritonBackend().why_not(replace(SHAPE, num_heads=num_heads, num_kv_heads=1, dtype=dtype), CUDA)
    assert reason == (f"{num_heads} query heads share a KV head, at most {most} may" if most else "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [0, 300])
def test_all_that_serve_a_group_on_a_gpu_agree(window: int) -> None:
    """Decodes beside chunks that occupy the GPU."""
    paged = on_device(make_paged(REAL["8b"], torch.bfloat16))
    shape, scale = attention_shape(paged, window), paged.query.shape[2] ** -0.5
    serving = [backend for backend in ATTENTION_BACKENDS if not backend.why_not(shape, DEVICE)]
    assert choose_attention(shape, DEVICE).backend is serving[0]
    assert len(serving) == 2 + (torch.cuda.get_device_capability(DEVICE) == (9, 0) and not window)
    found = []
    for backend in serving:
        plan = backend.attention(shape, DEVICE).plan(paged.packed)
        assert not isinstance(plan, LatentPlan)
        found.append(plan.run(paged.query, paged.cache, scale))
    for out in found[:-1]:
        assert (out.double() - found[-1].double()).abs().max() < TOLERANCE[torch.bfloat16]
