"""Packed weights beside their specification, and mixtures with biases beside their definition."""

from __future__ import annotations

import math

import pytest
import torch

from pd_cluster.models.quantization import BYTES_OF_FORM
from pd_kernels import reference
from pd_kernels.backends import TORCH
from pd_kernels.biased_experts import BiasedExperts
from pd_kernels.packed_room import ROOMS
from pd_kernels.torch_biased_experts import clamped_swiglu
from pd_kernels.values import ExpertPart, HalfNormed
from pd_kernels.weight_forms import FORMS, MXFP4, PackedWeight
from tests.worker.packed_models import number, unpacked

HIDDEN, SIZE, NUM_EXPERTS = 64, 32, 5
# The numbers of e2m1 as OCP's table 7 lists them, by code
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def test_the_tests_own_numbers_are_the_published_ones() -> None:
    assert [number(code) for code in range(16)] == list(E2M1)
    assert math.copysign(1, number(8)) == -1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_codes_and_exponents_of_mxfp4(dtype: torch.dtype) -> None:
    """Exact in bfloat16, subnormals too; what its range lacks is infinite. Exponent 255 is NaN."""
    low = torch.arange(16, dtype=torch.uint8)
    blocks = (low | (15 - low) << 4).expand(256, 16)[:, None]
    found = MXFP4.take(blocks, torch.arange(256, dtype=torch.uint8)[:, None], dtype)
    assert found.shape == (256, 32)
    assert found.dtype is dtype
    for exponent, row in enumerate(found.tolist()):
        for code, values in enumerate(zip(row[::2], row[1::2], strict=True)):
            for one, value in zip((code, 15 - code), values, strict=True):
                expected = E2M1[one] * 2.0 ** (exponent - 127)
                if exponent == 255:
                    assert math.isnan(value)
                elif abs(expected) >= 2.0**128:
                    assert value == math.copysign(math.inf, expected)
                else:
                    assert (value, math.copysign(1, value)) == (expected, math.copysign(1, expected))


def test_each_form_says_its_bytes() -> None:
    assert {name: (form.size + 1) / form.group for name, form in FORMS.items()} == BYTES_OF_FORM


def test_each_form_has_room_for_itself_and_for_whole_tiles() -> None:
    assert FORMS.keys() == ROOMS.keys()
    for name, form in FORMS.items():
        for outputs in (1, 64, 192, 193, 2880, 5760):
            for groups in (1, 4, 5, 90):
                blocks, scales = ROOMS[name](outputs, groups * form.group)
                assert blocks >= outputs * groups * form.size
                assert scales >= outputs * groups
    assert sum(ROOMS["mxfp4"](5760, 2880)) == 5760 * 2880 * 17 // 32, "gpt-oss's weights need no more"


def random_experts(dtype: torch.dtype, *, packed: bool) -> BiasedExperts:
    random = torch.Generator().manual_seed(0)

    def weight(num_outputs: int, num_inputs: int) -> torch.Tensor | PackedWeight:
        shape = (NUM_EXPERTS, num_outputs, num_inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(123, 127, shape, dtype=torch.uint8, generator=random)
        return PackedWeight(MXFP4, blocks, scales) if packed else unpacked(blocks, scales).to(dtype)

    def bias(size: int) -> torch.Tensor:
        return torch.randn(NUM_EXPERTS, size, generator=random).to(dtype)

    return BiasedExperts(
        weight(2 * SIZE, HIDDEN), bias(2 * SIZE), weight(HIDDEN, SIZE), bias(HIDDEN), limit=7.0, alpha=1.702
    )


def pairs(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, scores and experts. No token chooses the last expert."""
    random = torch.Generator().manual_seed(count)
    chosen = torch.stack([torch.randperm(NUM_EXPERTS - 1, generator=random)[:3] for _ in range(count)])
    return torch.randn(count, HIDDEN, generator=random), torch.rand(count, 3, generator=random), chosen


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)]
)
def test_library_calls_equal_the_definition(dtype: torch.dtype, tolerance: float, packed: bool) -> None:
    weights = random_experts(dtype, packed=packed)
    mix = TORCH.biased_experts(weights, None)
    for count in (1, 2, 30):
        x, scores, chosen = pairs(count)
        x, scores = x.to(dtype), scores.to(torch.promote_types(dtype, torch.float32))
        found, expected = mix(x, scores, chosen), reference.biased_experts(x, scores, chosen, weights)
        assert found.dtype is dtype
        torch.testing.assert_close(found, expected, atol=tolerance * float(expected.abs().max()), rtol=0)


def test_packed_and_plain_weights_of_equal_numbers_give_equal_bits() -> None:
    found = [TORCH.biased_experts(random_experts(torch.float32, packed=packed), None) for packed in (False, True)]
    assert torch.equal(found[0](*pairs(20)), found[1](*pairs(20)))


def test_gates_and_ups_are_clamped() -> None:
    """Each side of both limits: a gate has no lower one."""
    x = torch.tensor([[8.0, 9.0, -20.0, -9.0, 1.0, -1.0, 7.0, 7.0]], dtype=torch.float64)
    most = 7 / (1 + math.exp(-1.702 * 7))
    expected = [8 * most, -6 * -20 / (1 + math.exp(1.702 * 20)), 0.0, 8 * most]
    torch.testing.assert_close(clamped_swiglu(x, 7.0, 1.702)[0], torch.tensor(expected, dtype=torch.float64))


def test_the_experts_of_ranks_add_up() -> None:
    weights, (x, scores, chosen) = random_experts(torch.float64, packed=False), pairs(12)
    given, total = (x.double(), scores.double(), chosen), torch.zeros(12, HIDDEN, dtype=torch.float64)
    for first, end in ((0, 2), (2, 5)):
        assert isinstance(weights.gate_up, torch.Tensor)
        assert isinstance(weights.down, torch.Tensor)
        gate_up, down, own = weights.gate_up[first:end], weights.down[first:end], slice(first, end)
        some = BiasedExperts(gate_up, weights.gate_up_bias[own], down, weights.down_bias[own], 7.0, 1.702)
        part = ExpertPart(first, NUM_EXPERTS)
        found = TORCH.biased_experts(some, part)(*given)
        torch.testing.assert_close(found, reference.biased_experts(*given, some, part=part))
        total += found
    torch.testing.assert_close(total, TORCH.biased_experts(weights, None)(*given))


def test_rows_that_are_half_normed_are_divided() -> None:
    mix, (x, *given) = TORCH.biased_experts(random_experts(torch.float32, packed=True), None), pairs(4)
    half = HalfNormed(3 * x, (9 * x * x).sum(-1)[None], 1e-6)
    torch.testing.assert_close(mix(half, *given), mix(half.normed(), *given))
