"""Rows of logits with limits of all kinds, and the set that the definition keeps, for the tests of both versions."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch

from pd_kernels.values import Draws, Limits

TOP_K = (0, 1, 2, 20, 40, 63, 64, 65, 700, 1500, 5000)  # 0: all
TOP_P = (1.0, 0.01, 0.5, 0.9, 0.95, 0.999)
MIN_P = (0.0, 0.0, 1e-4, 0.05, 1.0)
TEMPERATURES = (0.6, 1.0, 1.7, 0.0)


def make_draws(num_rows: int, vocab_size: int, seed: int = 0, device: str | torch.device = "cpu") -> Draws:
    """Every row has another combination of limits; in each fourth row none."""
    every = list(itertools.product(TOP_K, TOP_P, MIN_P))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(every), generator=generator).tolist()
    chosen = [every[order[at % len(every)]] if at % 4 else (0, 1.0, 0.0) for at in range(num_rows)]
    top_k, top_p, min_p = zip(*chosen, strict=True)
    temperature = torch.tensor([TEMPERATURES[(at // 3) % 4] for at in range(num_rows)])
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (num_rows,), generator=generator)
    limits = Limits(torch.tensor([k or vocab_size for k in top_k]), torch.tensor(top_p), torch.tensor(min_p))
    return on(Draws(temperature, seeds, torch.arange(num_rows) * 7, limits), device)


def on(draws: Draws, device: str | torch.device) -> Draws:
    assert draws.limits is not None
    limits = Limits(*(each.to(device) for each in (draws.limits.top_k, draws.limits.top_p, draws.limits.min_p)))
    return Draws(draws.temperature.to(device), draws.seeds.to(device), draws.positions.to(device), limits)


def make_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Float32 rows: steep, even and coarse ones (with many ties), with bans, infinities of every row and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    logits *= torch.tensor([0.01, 1.0, 4.0, 9.0])[torch.arange(num_rows) % 4][:, None]
    logits[1::3] = logits[1::3].bfloat16().float()
    logits[2::7] = logits[2::7].round()
    logits[3::5, ::3] = -torch.inf
    logits[4::11] *= -1e-3
    logits[5::13, 1::2] = -0.0
    return logits


def kept_by_definition(
    logits: npt.NDArray[np.float32], temperature: float, top_k: float, top_p: float, min_p: float
) -> npt.NDArray[np.bool_]:
    """Which tokens of a row (float32 [V]) may be drawn: by a sort, in float64. -> bool [V]."""
    values = logits.astype(np.float64)
    best = np.sort(values)[::-1]
    inside = best[best >= best[min(int(top_k), len(best)) - 1]]  # with all that tie with the k-th
    share = np.exp((inside - best[0]) / temperature)
    before = np.cumsum(share) - share
    floor = inside[np.flatnonzero(before / share.sum() < np.float32(top_p))[-1]] if top_p < 1 else inside[-1]
    if min_p > 0:
        floor = max(floor, np.float32(best[0] + temperature * np.log(np.float64(np.float32(min_p)))))
    kept: npt.NDArray[np.bool_] = (values >= floor) & (values > -np.inf)
    return kept
