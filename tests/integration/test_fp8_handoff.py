"""A cluster of fp8 caches: the same answers on every path, cold and warm, and a quarter of float32's bytes.

A decode node without an fp8 cache computes by itself what the prefill node has in fp8.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.integration.reference import random_prompt
from tests.integration.system import BLOCK_BYTES, BLOCK_SIZE, Answer, Path, System, running_system

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LENGTHS = (5, 16, 47, 100, 300)


@pytest.fixture
def system(chunked_fp8: System) -> System:
    return chunked_fp8


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_prompt(random.Random(length), length) for length in LENGTHS]


def ask(system: System, path: Path, prompts: Sequence[list[int]], num_tokens: int = 12) -> list[Answer]:
    """Salted: no path finds what another one has cached."""
    body = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "cache_salt": path.value}
    return system.ask_all(path, [("/v1/completions", {"prompt": prompt, **body}) for prompt in prompts])


def texts(answers: Sequence[Answer]) -> list[str]:
    return [answer.choices[0]["text"] for answer in answers]


def test_handed_over_equals_computed_here(system: System, prompts: list[list[int]]) -> None:
    expected = texts(ask(system, Path.MIXED, prompts))
    moved = system.settled_metric("decode", "pd_kv_transfer_bytes_total")
    for path in (Path.P_FIRST, Path.D_FIRST):
        cold = ask(system, path, prompts)
        assert texts(cold) == expected
        assert {answer.headers["x-pd-prefill"] for answer in cold} == {"prefill"}
        now = system.settled_metric("decode", "pd_kv_transfer_bytes_total")
        assert now - moved == sum(-(-length // BLOCK_SIZE) for length in LENGTHS) * BLOCK_BYTES / 4
        warm = ask(system, path, prompts)
        assert texts(warm) == expected
        assert warm[-1].num_cached_tokens >= LENGTHS[-1] // BLOCK_SIZE * BLOCK_SIZE
        moved = system.settled_metric("decode", "pd_kv_transfer_bytes_total")


@pytest.mark.slow
def test_a_preempted_sequence_goes_on_as_before(system: System) -> None:
    """Six prompts of 3 blocks that become 5, in a cache of 20; then with room for swapped ones in host memory."""
    prompts = [random_prompt(random.Random(seed), 44) for seed in range(6)]
    expected = texts(ask(system, Path.MIXED, prompts, num_tokens=30))
    for swap_gb, counter in (("0", "pd_preemptions_recompute_total"), ("0.01", "pd_preemptions_swap_total")):
        with running_system("--kv-cache-dtype=fp8", "--num-blocks=20", f"--swap-gb={swap_gb}") as small:
            assert texts(ask(small, Path.MIXED, prompts, num_tokens=30)) == expected
            assert small.settled_metric("decode", counter) > 0


@pytest.mark.slow
def test_a_node_of_another_dtype_prefills_by_itself(prompts: list[list[int]]) -> None:
    with running_system(role_flags={"prefill": ["--kv-cache-dtype=fp8"]}) as system:
        answers = ask(system, Path.P_FIRST, prompts)
        assert {answer.headers["x-pd-prefill"] for answer in answers} == {"decode"}
        assert texts(answers) == texts(ask(system, Path.MIXED, prompts))
        assert system.settled_metric("decode", "pd_kv_transfer_bytes_total") == 0
