"""Exactly the blocks that D lacks are moved: whole blocks, each once, and none that D has cached."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.integration.reference import random_prompt
from tests.integration.system import SHALLOW_BLOCK_BYTES, Path, System, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

COMPLETIONS = "/v1/completions"
ROUTES = (Path.P_FIRST, Path.D_FIRST)


@pytest.fixture
def system(shared_system: System) -> System:
    return shared_system


def moved_blocks(system: System, path: Path, prompt: Sequence[int], *, num_loads: int = 1) -> float:
    """Send one prompt; blocks that came over while it was served, whole loads that it took being `num_loads`."""
    before = system.settled_metrics("decode")
    system.ask(path, COMPLETIONS, {"prompt": list(prompt), "max_tokens": 4, "temperature": 0, "ignore_eos": True})
    done = before["pd_loads_done_total"] + num_loads
    wait_until(lambda: system.metric("decode", "pd_loads_done_total") == done, lambda: str(system.metrics("decode")))
    after = system.settled_metrics("decode")
    assert after["pd_loads_done_total"] == done
    return (after["pd_kv_transfer_bytes_total"] - before["pd_kv_transfer_bytes_total"]) / SHALLOW_BLOCK_BYTES


def draw(seed: int, length: int) -> list[int]:
    """A prompt that no other test uses."""
    return random_prompt(random.Random(seed), length)


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("length", "num_blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (100, 7), (512, 32)])
def test_cold(length: int, num_blocks: int, path: Path, system: System) -> None:
    prompt = draw(length * 10 + (path is Path.P_FIRST), length)
    assert moved_blocks(system, path, prompt) == num_blocks


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("cached", "num_blocks"), [(48, 4), (47, 5), (96, 1), (16, 6)])
def test_partly_cached_on_d(cached: int, num_blocks: int, path: Path, system: System) -> None:
    """D has computed the beginning of the prompt itself. 100 tokens are 7 blocks."""
    prompt = draw(100_000 + cached * 2 + (path is Path.P_FIRST), 100)
    assert moved_blocks(system, Path.MIXED, prompt[:cached], num_loads=0) == 0
    assert moved_blocks(system, path, prompt) == num_blocks


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("length", "num_blocks"), [(96, 0), (97, 1)])
def test_wholly_cached_on_d(length: int, num_blocks: int, path: Path, system: System) -> None:
    """Nothing is moved but a block that is not full: such blocks are not cached."""
    prompt = draw(200_000 + length * 2 + (path is Path.P_FIRST), length)
    assert moved_blocks(system, path, prompt) == -(-length // 16)
    asks_no_node = path is Path.D_FIRST and num_blocks == 0
    assert moved_blocks(system, path, prompt, num_loads=0 if asks_no_node else 1) == num_blocks


@pytest.mark.parametrize("path", ROUTES)
def test_cached_on_p_only(path: Path, system: System) -> None:
    """P's own hits save computing, not moving."""
    prompt = draw(300_000 + (path is Path.P_FIRST), 100)
    direct = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    hits = system.settled_metric("prefill", "pd_prefix_cache_hit_tokens_total")
    system.ask_node("prefill", COMPLETIONS, direct)
    assert moved_blocks(system, path, prompt) == 7
    assert system.settled_metric("prefill", "pd_prefix_cache_hit_tokens_total") - hits == 96
