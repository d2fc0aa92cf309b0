"""The definition of layers with states beside transformers' modules, and wherever a prompt is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from pd_kernels.backends import TORCH
from tests.kernels.state_steps import WIDTH, Part, make_cache, make_layer, make_plan, make_tokens, run_layer

CPU = torch.device("cpu")
LAYER = make_layer(2, 4, 16, 8)
COUNT = 150


def whole() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Results of a prompt in one step, and the states after it and after its first piece."""
    cache = make_cache(LAYER, 5, ())
    plan = make_plan([Part(0, COUNT, -1, 2, ((0, 3),))], CPU)
    found = run_layer(TORCH.state, LAYER, make_tokens(LAYER, COUNT), cache, plan)
    assert all(bool(part[slot].isnan().all()) for part in cache for slot in (0, 1, 4))
    return found, [part[slot] for slot in (2, 3) for part in cache]


def test_a_prompt_is_transformers() -> None:
    """Its convolution, its rule in pieces, and its states: at the end, and after 64 tokens."""
    (x, g, beta), (found, states) = make_tokens(LAYER, COUNT), whole()
    for count, (conv, recurrent) in ((COUNT, states[:2]), (64, states[2:])):
        last = torch.split(x[count - WIDTH + 1 : count].T, [32, 32, 32])
        assert torch.equal(conv, torch.cat([part.reshape(2, -1, WIDTH - 1) for part in last], 1)), "by key head"
        mixed = F.silu(
            F.conv1d(x[:count].T, LAYER.weight[:, None], LAYER.bias, padding=WIDTH - 1, groups=LAYER.channels)
        )
        q, k, v = (part.view(-1, size, part.shape[1]).permute(2, 0, 1)[None, :count]
                   for part, size in zip(mixed.tensor_split((32, 64)), (16, 16, 8), strict=True))  # fmt: skip
        expected, state = qwen3_next.torch_chunk_gated_delta_rule(
            q, k, v, g[None, :count], beta[None, :count], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        torch.testing.assert_close(found[:count], expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(recurrent, state[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cuts", [(64, 128), (1, 2, 3, 70), (63, 65, 149)], ids=str)
def test_cuts_change_no_bit(cuts: tuple[int, ...]) -> None:
    """From step to step in one slot or in another, alone or after a sequence that is not of this prompt."""
    expected, states = whole()
    tokens, cache, found, slot = make_tokens(LAYER, COUNT), make_cache(LAYER, 5, (4,)), [], -1
    for begin, end in zip((0, *cuts), (*cuts, COUNT), strict=True):
        parts = [Part(begin, end - begin, slot, 2 if end == COUNT else 1)]
        mine, slot = tokens.of(slice(begin, end)), parts[0].slot
        if begin % 2:
            parts.append(Part(5, 1, 4, 4))
            mine = type(mine)(*(torch.cat((own, other[:1])) for own, other in zip(mine, tokens, strict=True)))
        found.append(run_layer(TORCH.state, LAYER, mine, cache, make_plan(parts, CPU))[: end - begin])
    assert torch.equal(torch.cat(found), expected)
    assert all(torch.equal(one[2], other) for one, other in zip(cache, states[:2], strict=True))


def test_gates_and_norms_are_transformers() -> None:
    random = torch.Generator().manual_seed(5)
    a, b, x, gate = (torch.randn(9, 4, *size, generator=random) * 5 for size in ((), (), (8,), (8,)))
    log, bias, weight = (torch.randn(size, generator=random) for size in (4, 4, 8))
    g, beta = TORCH.state.gates(a, b, log, bias)
    assert torch.equal(g, -log.exp() * F.softplus(a + bias))
    assert torch.equal(beta, b.sigmoid())
    norm = qwen3_next.Qwen3NextRMSNormGated(8, eps=1e-6)
    norm.weight.data.copy_(weight)
    torch.testing.assert_close(TORCH.state.gated_norm(x, gate, weight, 1e-6), norm(x, gate).detach())
