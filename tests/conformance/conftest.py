"""The harnesses: those of this repository, or the one that `--harness` names."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.conformance.handoffs import (
    HandoffHarness,
    LoopbackHandoff,
    RankedLoopbackHandoff,
    RankedRemoteHandoff,
    RemoteHandoff,
)
from tests.conformance.harness import Harness
from tests.conformance.pools import LMCacheHarness, MooncakeHarness, PoolHarness, RankedLMCacheHarness
from tests.connectors.mooncake_master import needs_mooncake
from tests.connectors.store_server import needs_lmcache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance.harness import Reader

needs_nixl = pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="NIXL is not installed: [nixl]")
OURS: dict[type[Harness], list[pytest.MarkDecorator]] = {
    LoopbackHandoff: [],
    RankedLoopbackHandoff: [pytest.mark.slow],  # as NIXL's ranks; simulations have four ranks and their faults, too
    RemoteHandoff: [needs_nixl, pytest.mark.integration],
    RankedRemoteHandoff: [needs_nixl, pytest.mark.integration],
    LMCacheHarness: [needs_lmcache, pytest.mark.integration],
    RankedLMCacheHarness: [needs_lmcache, pytest.mark.integration, pytest.mark.slow],
    MooncakeHarness: [needs_mooncake, pytest.mark.integration],
}


def pytest_addoption(parser: pytest.Parser) -> None:
    with suppress(ValueError):  # it is known already
        parser.addoption("--harness", metavar="MODULE:CLASS", help="Run the conformance suite on this harness instead.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "harness" not in metafunc.fixturenames:
        return
    path = metafunc.config.getoption("--harness", None)
    chosen = OURS
    if path:
        module, _, name = path.partition(":")
        chosen = {getattr(import_module(module), name): []}
    wanted = {"handoff": HandoffHarness, "pool": PoolHarness}.get(getattr(metafunc.module, "KIND", ""), Harness)
    matching = [pytest.param(kind, id=_name(kind), marks=marks) for kind, marks in chosen.items()
                if issubclass(kind, wanted)]  # fmt: skip
    metafunc.parametrize("harness", matching, indirect=True, scope="module")


def _name(kind: type[Harness]) -> str:
    ranks = (kind.source_ranks, kind.reader_ranks)
    return kind.connector if ranks == (1, 1) else "{}-{}-to-{}".format(kind.connector, *ranks)


@pytest.fixture(scope="module")
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """One source for all tests of a file: every failure must leave it able to go on."""
    with request.param() as harness:
        yield harness


@pytest.fixture(scope="module")
def shared_reader(harness: Harness) -> Iterator[Reader]:
    """One reader for them, too: it must get over everything that happens to the source."""
    reader = harness.reader("D")
    try:
        harness.wait_working(reader)
        yield reader
        reader.check_events()
    finally:
        reader.node.close()


@pytest.fixture(scope="module")
def shared_quick_reader(harness: Harness) -> Iterator[Reader]:
    """One that gives a silent source up soon."""
    reader = harness.reader("D-quick", is_quick=True)
    try:
        yield reader
        reader.check_events()
    finally:
        reader.node.close()


@pytest.fixture
def quick_reader(shared_quick_reader: Reader) -> Reader:
    """It, with nothing in its cache."""
    shared_quick_reader.wipe()
    return shared_quick_reader


@pytest.fixture
def reader(shared_reader: Reader) -> Reader:
    """It, with nothing in its cache."""
    shared_reader.wipe()
    return shared_reader
