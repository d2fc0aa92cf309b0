"""Triton's layers with states beside their definition, at odd lengths, from slots among others that are NaN."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels.state import StateCache, StateGates
from pd_kernels.torch_state import TorchState
from pd_kernels.triton_state import TritonState
from tests.kernels.state_steps import Part, make_cache, make_layer, make_plan, make_tokens, run_layer

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]

LAYER, SMALL = make_layer(), make_layer(1, 2, 16, 16)
USED, NUM_SLOTS = (2, 3, 4, 5, 6), 14
MIXED = [
    Part(70, 1, 2, 2),
    Part(0, 131, -1, 7, ((0, 8),)),
    Part(12, 0, 9, 9),  # none
    Part(100, 40, 3, 3, ((1, 10),)),
    Part(0, 1, -1, 11),
    Part(62, 2, 4, 12, ((0, 13),)),  # ends with its piece, of which the last inputs are not all new
    Part(62, 3, 5, 5),  # of the second piece, the first input needs one before the step
    Part(191, 1, 6, 6, ((2, 1),)),
]
DECODES = [Part(5, 1, 2, 2), Part(63, 1, 3, 3, ((0, 7),)), Part(0, 1, -1, 8), Part(9, 1, 0, 0), Part(80, 1, 4, 9)]


def on_device(cache: StateCache) -> StateCache:
    return StateCache(*(each.to(DEVICE) for each in cache))


def check(parts: list[Part], dtype: torch.dtype, *, is_decode: bool, num_padding: int = 0) -> None:
    """Results, states and saved states are the definition's; no other slot changes."""
    count = sum(part.tokens for part in parts)
    tokens = make_tokens(LAYER, count + num_padding).to(dtype, torch.device("cpu"))
    tokens.x[count:] = torch.nan
    expected, found = (make_cache(LAYER, NUM_SLOTS, USED, dtype) for _ in range(2))
    found, cpu = on_device(found), torch.device("cpu")
    wanted = run_layer(TorchState(), LAYER, tokens, expected, make_plan(parts, cpu, is_decode=is_decode))[:count]
    plan = make_plan(parts, DEVICE, is_decode=is_decode)
    result = run_layer(TritonState(), LAYER, tokens.to(dtype, DEVICE), found, plan)[:count].cpu()
    atol = TOLERANCE[dtype]
    torch.testing.assert_close(result, wanted, atol=atol, rtol=atol, equal_nan=is_decode)  # padding rows are NaN
    for slot in range(1, NUM_SLOTS):
        assert torch.equal(found.conv[slot].cpu().nan_to_num(7.0), expected.conv[slot].nan_to_num(7.0)), slot
        torch.testing.assert_close(
            found.recurrent[slot].cpu(), expected.recurrent[slot], atol=10 * atol, rtol=atol, equal_nan=True
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts_beside_decodes(dtype: torch.dtype) -> None:
    """In short dtypes without saves: then launches are as large as shapes allow."""
    parts = MIXED if dtype is torch.float32 else [part._replace(saves=()) for part in MIXED]
    check(parts, dtype, is_decode=False, num_padding=9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decodes_with_padding(dtype: torch.dtype) -> None:
    check(DECODES, dtype, is_decode=True)


def run(parts: list[Part], cache: StateCache, *, seed: int, first: int = 0, is_decode: bool = False) -> torch.Tensor:
    """Tokens from `first` on of the random ones of `seed`."""
    count = sum(part.tokens for part in parts)
    tokens = make_tokens(SMALL, 200, seed).of(slice(first, first + count)).to(torch.float32, DEVICE)
    return run_layer(TritonState(), SMALL, tokens, cache, make_plan(parts, DEVICE, is_decode=is_decode))


def test_cuts_at_multiples_of_64_change_no_bit() -> None:
    """Nor does continuing from a saved state."""
    whole, parts = (on_device(make_cache(SMALL, NUM_SLOTS, ())) for _ in range(2))
    expected = run([Part(0, 200, -1, 2, ((1, 3),))], whole, seed=2)
    found = [run([Part(0, 64, -1, 2)], parts, seed=2), run([Part(64, 64, 2, 3)], parts, seed=2, first=64)]
    found.append(run([Part(128, 72, 3, 2)], parts, seed=2, first=128))
    assert torch.equal(torch.cat(found), expected)
    for one, other in zip(parts, whole, strict=True):
        assert torch.equal(one[2:4], other[2:4])


def test_a_cut_inside_a_piece_changes_roundings_alone() -> None:
    whole, parts = (on_device(make_cache(SMALL, NUM_SLOTS, ())) for _ in range(2))
    expected, found, at = run([Part(0, 150, -1, 2)], whole, seed=3), [], 0
    for count in (1, 30, 34, 2, 80, 3):
        found.append(run([Part(at, count, 2 if at else -1, 2)], parts, seed=3, first=at))
        at += count
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(parts.recurrent[2], whole.recurrent[2], atol=2e-5, rtol=2e-5)


def test_other_sequences_change_no_bit() -> None:
    """A decode beside prompts has the bits that it has among decodes."""
    caches = [on_device(make_cache(SMALL, NUM_SLOTS, USED)) for _ in range(3)]
    beside = run([Part(9, 1, 2, 2), Part(0, 70, -1, 7)], caches[0], seed=4)
    alone = run([Part(9, 1, 2, 2)], caches[1], seed=4, is_decode=True)
    prompt = run([Part(0, 70, -1, 7)], caches[2], seed=4, first=1)
    assert torch.equal(beside, torch.cat((alone, prompt)))
    for slot, cache in ((2, caches[1]), (7, caches[2])):
        assert torch.equal(caches[0].conv[slot], cache.conv[slot])
        assert torch.equal(caches[0].recurrent[slot], cache.recurrent[slot])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_and_norms(dtype: torch.dtype) -> None:
    """Of views of a wider product. Softplus is exact at both ends."""
    random = torch.Generator().manual_seed(5)
    both = (torch.randn(37, 12, generator=random) * 20).to(DEVICE, dtype)
    log, bias = (torch.randn(6, generator=random).to(DEVICE) for _ in range(2))
    for found, expected in zip(
        TritonState().gates(both[:, :6], both[:, 6:], log, bias),
        TorchState().gates(both[:, :6], both[:, 6:], log, bias),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, atol=0, rtol=1e-5)
    x, gate = (torch.randn(37, 6, 80, generator=random).to(DEVICE, dtype)[:, 1:5] for _ in range(2))
    weight = torch.randn(80, generator=random).to(DEVICE, dtype)
    given = (x, gate, weight, 1e-6)
    torch.testing.assert_close(TritonState().gated_norm(*given), TorchState().gated_norm(*given))


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_gates_are_computed_where_they_are_used(parts: list[Part], dtype: torch.dtype) -> None:
    """Of views of a wider product, beside prompts too. Bit for bit as two launches compute them."""
    count, is_decode, random = sum(part.tokens for part in parts), parts is DECODES, torch.Generator().manual_seed(6)
    q, k = (torch.randn(count, 2, 16, generator=random).to(DEVICE, dtype) for _ in range(2))
    v = torch.randn(count, 4, 32, generator=random).to(DEVICE, dtype)
    both = (torch.randn(count, 8, generator=random) * 4).to(DEVICE, dtype)
    log, bias = (torch.randn(4, generator=random).to(DEVICE) for _ in range(2))
    gates, plan = StateGates(both[:, 4:], both[:, :4], log, bias), make_plan(parts, DEVICE, is_decode=is_decode)
    one, other = (on_device(make_cache(LAYER, NUM_SLOTS, USED)).recurrent for _ in range(2))
    for ops in (TritonState(), TorchState()):
        found = ops.mix_gated(q, k, v, gates, one, plan, 0.25)
        expected = ops.mix(q, k, v, *ops.gates(*gates), other, plan, 0.25)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_sizes_that_no_tile_has_are_refused() -> None:
    layer = make_layer(key_dim=24)
    with pytest.raises(ValueError, match="powers of two"):
        run_layer(
            TritonState(), layer, make_tokens(layer, 3).to(torch.float32, DEVICE),
            on_device(make_cache(layer, 3, ())), make_plan([Part(0, 3, -1, 1)], DEVICE),
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_real_sizes() -> None:
    """Those of Qwen3.6-35B-A3B in bfloat16: within its rounding, and of equal bits in two runs."""
    layer = make_layer(16, 32, 128, 128)
    parts = [*(Part(70, 1, slot, slot) for slot in range(2, 10)), Part(0, 1500, -1, 10, ((20, 11),)),
             Part(100, 400, 12, 12), Part(9, 60, 13, 13)]  # fmt: skip
    tokens = make_tokens(layer, sum(part.tokens for part in parts)).to(torch.bfloat16, DEVICE)
    used, plan = (*range(2, 10), 12, 13), make_plan(parts, DEVICE)
    caches = [on_device(make_cache(layer, 14, used, torch.bfloat16)) for _ in range(3)]
    expected = run_layer(TorchState(), layer, tokens, caches[0], plan)
    found, again = (run_layer(TritonState(), layer, tokens, cache, plan) for cache in caches[1:])
    assert torch.equal(found, again)
    assert torch.equal(caches[1].recurrent[2:], caches[2].recurrent[2:])
    assert torch.equal(caches[1].conv[2:], caches[0].conv[2:])
    assert float((found - expected).norm() / expected.norm()) < 1e-2
    for slot in range(2, 14):
        wanted = caches[0].recurrent[slot]
        assert float((caches[1].recurrent[slot] - wanted).norm() / wanted.norm()) < 1e-2, slot


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_a_captured_step_follows_new_slots() -> None:
    """Captured with padding rows alone. A copy from host memory would end the capture, so weights are on the device."""
    layer = make_layer(2, 4, 128, 128).to(torch.bfloat16, DEVICE)
    plan = make_plan([Part(0, 1, 0, 0)] * 5, DEVICE, is_decode=True)
    tokens = make_tokens(layer, 5).to(torch.bfloat16, DEVICE)
    caches = [on_device(make_cache(layer, 8, (0, 2, 3, 4), torch.bfloat16)) for _ in range(2)]
    run_layer(TritonState(), layer, tokens, caches[0], plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_layer(TritonState(), layer, tokens, caches[0], plan)
    wanted = make_plan([Part(8, 1, 2, 2), Part(0, 1, -1, 5), Part(3, 1, 4, 6), *[Part(0, 1, 0, 0)] * 2], DEVICE)
    plan.sources.copy_(wanted.sources)
    plan.slots.copy_(wanted.slots)
    graph.replay()
    expected = run_layer(TorchState(), layer, tokens, caches[1], wanted)
    torch.testing.assert_close(found[:3], expected[:3], atol=5e-2, rtol=5e-2)
    for slot in (2, 4, 5, 6):
        torch.testing.assert_close(caches[0].recurrent[slot], caches[1].recurrent[slot], atol=1e-2, rtol=1e-2)
    assert torch.isnan(caches[0].recurrent[7]).all()
