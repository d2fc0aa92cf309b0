"""Which attention of prompts is chosen: with fakes and a fake clock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from pd_kernels.backends import TORCH
from pd_kernels.prefill_choice import AttentionShape, PrefillChoice, choose_prefill

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_kernels.backends import AttentionPlan, Kernels
    from pd_kernels.values import PackedSequences

SHAPE = AttentionShape(4, 2, 16, 16, torch.float32, torch.device("cpu"))


@dataclass(frozen=True)
class FakeAttention:
    """Torch's, off by `offset`, that pretends to take `time` on `clock`; it does not run if `broken`."""

    time: float
    clock: list[float]
    offset: float = 0.0
    broken: bool = False

    def __call__(self, packed: PackedSequences, key_cache: torch.Tensor, window: int = 0) -> FakePlan:
        return FakePlan(self, TORCH.plan_attention(packed, key_cache, window))


@dataclass(frozen=True)
class FakePlan:
    fake: FakeAttention
    plan: AttentionPlan

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.fake.broken:
            raise RuntimeError("no such instruction")
        self.fake.clock.append(self.fake.time)
        return self.plan.run(query, key_cache, value_cache, scale, out) + self.fake.offset


def fake(name: str, time: float, clock: list[float], offset: float = 0.0, broken: bool = False) -> Kernels:
    return replace(TORCH, name=name, plan_attention=FakeAttention(time, clock, offset, broken))


def choose(time: float, offset: float = 0.0, broken: bool = False) -> PrefillChoice:
    """Between a usual one that takes 10 and another."""
    clock: list[float] = []

    def measure(run: Callable[[], None]) -> float:
        clock.clear()
        run()
        return sum(clock)

    other = fake("other", time, clock, offset, broken)
    return choose_prefill(fake("usual", 10.0, clock), lambda: other, SHAPE, 40, measure)


@pytest.mark.parametrize(("time", "name"), [(7.0, "other"), (9.9, "usual"), (12.0, "usual")])
def test_the_faster_one_is_chosen_if_by_more_than_noise(time: float, name: str) -> None:
    choice = choose(time)
    assert choice.kernels.name == name
    assert choice.reason == f"{name}: 40 tokens take usual 10.000 ms, other {time:.3f} ms"


def test_one_that_does_not_run_is_not_taken() -> None:
    choice = choose(1.0, broken=True)
    assert (choice.kernels.name, choice.reason) == ("usual", "usual: no such instruction")


@pytest.mark.parametrize("offset", [0.1, float("nan")])
def test_one_that_finds_something_else_is_not_taken(offset: float) -> None:
    choice = choose(1.0, offset)
    assert choice.kernels.name == "usual"
    assert "other is off by" in choice.reason


def test_one_that_is_not_installed_is_not_taken() -> None:
    def propose() -> Kernels:
        raise ModuleNotFoundError("No module named 'other'")

    choice = choose_prefill(TORCH, propose, SHAPE, 40, lambda run: 0.0)
    assert choice.kernels is TORCH
    assert choice.reason == "torch: No module named 'other'"
