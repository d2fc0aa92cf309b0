"""Steps of layers with states: random tensors, plans, and caches in which unused slots are NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from pd_kernels.state import PIECE, StateCache, StatePlan

if TYPE_CHECKING:
    from pd_kernels.state import StateOps

WIDTH = 4


class Part(NamedTuple):
    """The tokens of a sequence that a step has."""

    position: int
    tokens: int
    source: int
    slot: int
    saves: tuple[tuple[int, int], ...] = ()  # pieces of the sequence, and slots


@dataclass(frozen=True)
class Layer:
    """Sizes, and what is the same in all steps."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    weight: torch.Tensor
    bias: torch.Tensor

    @property
    def channels(self) -> int:
        return self.weight.shape[0]

    def to(self, dtype: torch.dtype, device: torch.device) -> Layer:
        return replace(self, weight=self.weight.to(device, dtype), bias=self.bias.to(device, dtype))


class Tokens(NamedTuple):
    """What a layer has of some tokens: x of the convolution, which makes q, k and v of it; g, beta."""

    x: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def of(self, part: slice) -> Tokens:
        return Tokens(*(each[part] for each in self))

    def to(self, dtype: torch.dtype, device: torch.device) -> Tokens:
        return Tokens(self.x.to(device, dtype), self.g.to(device), self.beta.to(device))


def make_layer(key_heads: int = 2, value_heads: int = 4, key_dim: int = 16, value_dim: int = 32) -> Layer:
    random = torch.Generator().manual_seed(key_dim)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    weight, bias = torch.randn(channels, WIDTH, generator=random), torch.randn(channels, generator=random)
    return Layer(key_heads, value_heads, key_dim, value_dim, weight, bias)


def make_tokens(layer: Layer, count: int, seed: int = 0) -> Tokens:
    """Decays from 0.3 to nearly 1, as real models have them. Keys of neighbours are alike: large triangles."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, layer.channels, generator=random) + torch.randn(layer.channels, generator=random)
    g = -torch.exp(torch.rand(count, layer.value_heads, generator=random) * 6 - 6)
    return Tokens(x, g, torch.rand(count, layer.value_heads, generator=random))


def make_cache(layer: Layer, num_slots: int, used: tuple[int, ...], dtype: torch.dtype = torch.float32) -> StateCache:
    """Views of a larger tensor, as those of one layer of several are. All slots that are not `used` are NaN."""
    random = torch.Generator().manual_seed(1)
    shape = (num_slots, layer.value_heads, 2, layer.key_dim, layer.value_dim)
    of_head = layer.channels // layer.key_heads
    conv = torch.full((num_slots, layer.key_heads, 2, of_head, WIDTH - 1), torch.nan)[:, :, 1]
    recurrent = torch.full(shape, torch.nan)[:, :, 1]
    for slot in used:
        conv[slot] = torch.randn(conv.shape[1:], generator=random)
        recurrent[slot] = torch.randn(recurrent.shape[1:], generator=random)
    return StateCache(conv.to(dtype), recurrent)


def make_plan(parts: list[Part], device: torch.device, *, is_decode: bool = False) -> StatePlan:
    """Plan of the parts in turn."""
    starts, saves, piece_starts = [0], [], [0]
    for position, count, _, _, wanted in parts:
        starts.append(starts[-1] + count)
        pieces = range(position // PIECE, -(-(position + count) // PIECE)) if count else ()
        saves += [dict(wanted).get(piece, -1) for piece in pieces]
        piece_starts.append(len(saves))

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions, _, sources, slots, wanted = zip(*parts, strict=True)
    return StatePlan(
        ints(list(sources)), ints(list(slots)), ints(starts), ints(list(positions)),
        ints(saves) if any(wanted) else None, ints(piece_starts), is_decode,
    )  # fmt: skip


def run_layer(ops: StateOps, layer: Layer, tokens: Tokens, cache: StateCache, plan: StatePlan) -> torch.Tensor:
    """The convolution and the delta rule after it, as a model has them: q, k and v are views. -> [T, H, value_dim]."""
    mixed = ops.convolve(tokens.x, layer.weight.to(tokens.x), layer.bias.to(tokens.x), cache, plan)
    keys = layer.key_heads * layer.key_dim
    q, k, v = mixed.tensor_split((keys, 2 * keys), 1)
    q, k = (part.view(-1, layer.key_heads, layer.key_dim) for part in (q, k))
    v = v.view(-1, layer.value_heads, layer.value_dim)
    return ops.mix(q, k, v, tokens.g, tokens.beta, cache.recurrent, plan, layer.key_dim**-0.5)
