"""Fixtures and plugins for all tests."""

from __future__ import annotations

import functools
import gc
import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.deadlines import HANG_S, SLOW_HANG_S
from tests.kept_environment import kept_environment
from tests.kept_process import kept_process, let_children_hear_hangups
from tests.slow_cases import mark_slow_cases

if TYPE_CHECKING:
    import ssl
    from collections.abc import Generator, Iterator

    from tests.cluster import Launcher
    from tests.integration.system import System

YOUNG_OBJECTS = 10_000  # before a search for garbage: after 700, as by default, these took 1.5% of the tests' CPU
pytest_plugins = ["tests.recorded_runs", "tests.work_queue", "tests.forked_workers"]


def _hypothesis_on_a_busy_machine() -> None:
    """By default an example may take 0.2 s of wall time, and to draw ten of them a second.

    One of 0.02 s took 0.6 s on a busy machine.
    """
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy machine")


@functools.cache
def _shared_context(trust_env: bool, *files: str | None) -> ssl.SSLContext:
    """`files`: the variables that name other authorities than httpx' own."""
    import httpx

    return httpx.create_ssl_context(trust_env=trust_env)


def _ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    """As `httpx.create_ssl_context`. The default authorities are read once.

    httpx reads them for each client, and for each `httpx.get`: 37 ms of CPU, for http:// too.
    """
    if verify is True and cert is None:
        return _shared_context(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    import httpx

    return httpx.create_ssl_context(verify, cert, trust_env)


def _patient_httpx() -> None:
    """Its own 5 s are no guard against a hang: a busy machine reaches them."""
    import httpx._config as httpx_config
    import httpx._transports.default as httpx_transport

    assert hasattr(httpx_transport, "create_ssl_context")
    httpx_transport.create_ssl_context = _ssl_context  # it imports the name
    for part in ("connect", "read", "write", "pool"):
        assert getattr(httpx_config.DEFAULT_TIMEOUT_CONFIG, part) == 5.0
        setattr(httpx_config.DEFAULT_TIMEOUT_CONFIG, part, HANG_S)


def _one_parser() -> None:
    """To build it takes 30 ms of CPU for each command that a test calls."""
    from pd_cluster.launch import cli

    cli.build_parser = functools.cache(cli.build_parser)


def _only_starts_workers(config: pytest.Config) -> bool:
    """Whether workers of pytest-xdist run the tests. They wait until this process has started: 0.7 s of imports."""
    return config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Hardly any of what files make when they are imported is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    let_children_hear_hangups()
    if not _only_starts_workers(config):
        for set_up in (_hypothesis_on_a_busy_machine, _patient_httpx, _one_parser):
            set_up()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    config.addinivalue_line("markers", "needs_mooncake: skipped where Mooncake cannot be used")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_mooncake") is not None:
        from tests.connectors.mooncake_master import why_not

        if reason := why_not():
            pytest.skip(f"Mooncake: {reason}")


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All cases of a test that is marked `long_cases` are `long`, but the first one that is collected.

    Of one that is marked `slow_cases` those are slow that tests/slow_cases.py does not keep. A slow test may take
    SLOW_HANG_S.
    """
    seen: set[str] = set()
    mark_slow_cases(items)
    for item in items:
        if item.get_closest_marker("slow"):
            own = item.get_closest_marker("timeout")
            longest_s = max(SLOW_HANG_S, own.args[0] if own else 0.0)
            item.add_marker(pytest.mark.timeout(longest_s), append=False)
        if item.get_closest_marker("long_cases"):
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.long)
            seen.add(test)


@pytest.fixture(scope="module", autouse=True)
def seldom_searched_libraries() -> None:
    """Python searches for no garbage among what libraries and the tests' files have made before this file's tests.

    These are a million objects, and each search of them takes half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def environment_of_file() -> Iterator[None]:
    """What fixtures of a file set ends with the file: ranks that share a process set their interface."""
    with kept_environment(), kept_process():
        yield


@pytest.fixture(autouse=True)
def own_environment(environment_of_file: None) -> Iterator[None]:
    """Each test has the process's environment and settings for itself."""
    with kept_environment(), kept_process():
        yield


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """Starts `pd-cluster` processes; they are stopped after the test, which fails when one leaves a process behind."""
    from tests.cluster import Launcher

    with Launcher() as launcher:
        yield launcher


@pytest.fixture(scope="session")
def shared_system() -> Iterator[System]:
    """A prefill node, a decode node and a router, for tests that leave no trace and count by differences only."""
    from tests.integration.system import running_system

    with running_system("--kv-cache-gb=0.1") as system:
        yield system
