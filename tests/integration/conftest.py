"""What the integration tests compare with, computed once and only when a test asks for it; clusters that they share.

Clusters end when a worker leaves this folder: an idle node takes 1.7% of a core.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.integration.reference import LENGTHS, DemoModel, Reference, make_prompts
from tests.integration.system import System, running_system
from tests.shallow_model import as_demo_model, shallow_model

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 20
PART_OF_EACH_LENGTH = 16
SHORT = 300  # tokens


@pytest.fixture(scope="session", autouse=True)
def _quiet_clients() -> None:
    """Each request of ours is no news."""
    logging.getLogger("httpx").setLevel(logging.WARNING)


@pytest.fixture(scope="package")
def system_with_mixed() -> Iterator[System]:
    """With a mixed node beside P and D, and a logits stage that only requests with `logits_args` use.

    For tests that leave no trace and salt what is handed over. There is room and time for all prompts of
    `some_references` at once, beside their outputs. It has the shallow model under the whole one's name: each answer is
    compared with that of one node, or of `demo_model`.
    """
    flags = (*as_demo_model(), "--kv-cache-gb=0.07", "--load-deadline-s=200", "--logits-stage=tests.ban_token:BanToken")
    with running_system(*flags, own_mixed=True) as system:
        yield system


@pytest.fixture(scope="package")
def shared_system(system_with_mixed: System) -> System:
    """In place of that for all tests: one cluster less on two cores."""
    return system_with_mixed.without_mixed()


@pytest.fixture(scope="session")
def whole_model() -> DemoModel:
    """The demo model under transformers."""
    return DemoModel()


@pytest.fixture(scope="session")
def demo_model() -> DemoModel:
    """The shallow one under transformers."""
    return DemoModel(shallow_model())


@pytest.fixture(scope="session")
def references(demo_model: DemoModel) -> list[Reference]:
    """200 prompts and what transformers makes of them."""
    return demo_model.generate(make_prompts(demo_model, SEED))


@pytest.fixture(scope="session")
def whole_references(whole_model: DemoModel) -> list[Reference]:
    """The same of the whole model."""
    return whole_model.generate(make_prompts(whole_model, SEED))


@pytest.fixture(scope="session")
def some_prompts(demo_model: DemoModel) -> list[list[int]]:
    """A part of those of each length: with all, transformers alone takes 30 s, a run on a cluster three times as long.

    Blocks' edges, chunks and the longest prompt are among them.
    """
    left = Counter({length: -(-how_many // PART_OF_EACH_LENGTH) for length, how_many in LENGTHS})
    some = []
    for prompt in make_prompts(demo_model, SEED):
        if left[len(prompt)]:
            left[len(prompt)] -= 1
            some.append(prompt)
    return some


@pytest.fixture(scope="session")
def short_references(demo_model: DemoModel, some_prompts: list[list[int]]) -> list[Reference]:
    """Of those that fit a small cache."""
    return demo_model.generate([prompt for prompt in some_prompts if len(prompt) <= SHORT])


@pytest.fixture(scope="session")
def some_references(
    demo_model: DemoModel, some_prompts: list[list[int]], short_references: list[Reference]
) -> list[Reference]:
    """Of all of them."""
    return [*short_references, *demo_model.generate([prompt for prompt in some_prompts if len(prompt) > SHORT])]


@pytest.fixture(scope="package")
def chunked_fp8() -> Iterator[System]:
    """Caches in fp8. Prompts are computed in chunks, by P in small ones, and D reads beside its streams.

    No step is as short as D's target of gaps, so that D's prompts get the least of each.
    """
    prefill = ["--max-num-batched-tokens=64"]
    decode = ["--slo-itl-ms=1", "--max-num-batched-tokens=256"]
    flags = ("--kv-cache-dtype=fp8", "--kv-cache-gb=0.15")
    with running_system(*flags, role_flags={"prefill": prefill, "decode": decode}) as system:
        yield system


@pytest.fixture(scope="package")
def tool_system() -> Iterator[System]:
    """P and D with the tool model."""
    with running_system("--model=tool_model") as system:
        yield system
