"""Runs a target's tests over a mutant, in a process of its own that is forked with the slow imports done.

The mutated source lies in a temporary file and takes the module's place at its import: the tree is never written.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from importlib.abc import MetaPathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tests.mutation.targets import ROOT, SOURCE_ROOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from tests.mutation.operators import Mutant
    from tests.mutation.targets import Target

# What the tests import of others: seconds of each run, if it were not here before the fork.
PRELOADED = (
    "torch", "numpy", "hypothesis.stateful", "hypothesis.extra.pytestplugin", "pytest", "pytest_timeout", "anyio",
    "msgspec", "orjson", "zmq", "aiohttp", "httpx", "uvicorn", "uvloop", "starlette.applications", "fastapi",
    "prometheus_client", "psutil",
)  # fmt: skip
CPU_FACTOR, CPU_MARGIN_S = 3.0, 10.0  # of what the tests take without a mutant: more is an endless loop
LIFE_FACTOR, LIFE_MARGIN_S = 10.0, 60.0  # the same by the clock, for what waits for ever; the machine may be busy
MEMORY_MARGIN_BYTES = 8 << 30


class End(StrEnum):
    """How a mutant's run ended."""

    KILLED = "killed"  # a test failed, or the module could not be imported
    STOPPED = "stopped"  # it took too long: a test would have failed by its timeout
    SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class Run:
    """`output`: what pytest said."""

    end: End
    cpu_s: float
    life_s: float
    output: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run, in seconds."""

    cpu_s: float = 600.0
    life_s: float = 1200.0

    @classmethod
    def after(cls, run: Run) -> Limits:
        """Generous ones, by a run without a mutant."""
        return cls(CPU_FACTOR * run.cpu_s + CPU_MARGIN_S, LIFE_FACTOR * run.life_s + LIFE_MARGIN_S)


def preload() -> None:
    """Import what is not the repository's own. What is missing is missed by the tests themselves, if at all."""
    for root in reversed(SOURCE_ROOTS):
        sys.path.insert(0, str((ROOT / root).resolve()))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run_all(
    target: Target, sources: Sequence[str], limits: Limits, jobs: int, on_end: Callable[[int, Run], None]
) -> None:
    """Run the target's tests over each of its `sources`, `jobs` at a time. `on_end` gets the index and the run."""
    with TemporaryDirectory(prefix="mutants-") as folder:
        waiting = list(enumerate(sources))[::-1]
        running: dict[int, _Process] = {}
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    index, source = waiting.pop()
                    process = _Process(index, target, source, Path(folder), limits)
                    running[process.pidfd] = process
                soonest = min(process.end_at for process in running.values())
                ready, _, _ = select.select(list(running), [], [], max(0.0, soonest - time.monotonic()))
                late = [fd for fd, process in running.items() if time.monotonic() >= process.end_at]
                for pidfd in {*ready, *late}:
                    process = running.pop(pidfd)
                    on_end(process.index, process.collect())
        finally:
            for process in running.values():
                process.collect()


class _Process:
    """One run, from its fork to its collection."""

    def __init__(self, index: int, target: Target, source: str, folder: Path, limits: Limits) -> None:
        self.index = index
        self._path = folder / f"{index}_{Path(target.file).name}"
        self._path.write_text(source)
        self._output = folder / f"{index}.txt"
        self._began_at = time.monotonic()
        self.end_at = self._began_at + limits.life_s
        self._pid = os.fork()
        if not self._pid:
            _be_run(target, self._path, self._output, limits)
        self.pidfd = os.pidfd_open(self._pid)

    def collect(self) -> Run:
        """Wait for its end, or bring it about when its time is over."""
        was_stopped = not select.select([self.pidfd], [], [], 0)[0]
        if was_stopped:
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # what its tests may have left; before its id is free again
            os.killpg(self._pid, signal.SIGKILL)
        _, status, usage = os.wait4(self._pid, 0)
        os.close(self.pidfd)
        output = self._output.read_text(errors="replace") if self._output.exists() else ""
        self._path.unlink()
        self._output.unlink(missing_ok=True)
        code = os.waitstatus_to_exitcode(status)
        if code == 5:
            raise RuntimeError(f"no test was found:\n{output}")
        end = End.SURVIVED if code == 0 else End.STOPPED if was_stopped or code == -signal.SIGXCPU else End.KILLED
        return Run(end, usage.ru_utime + usage.ru_stime, time.monotonic() - self._began_at, output)


def _be_run(target: Target, path: Path, output: Path, limits: Limits) -> None:
    """The life of the forked process; it never returns."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        fd = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        used_s = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(used_s + limits.cpu_s) + 1, resource.RLIM_INFINITY))
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_MARGIN_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.meta_path.insert(0, _Overlay(target.module, path))
        code = _test(target.tests)
    except BaseException as error:
        os.write(2, repr(error).encode())
    finally:
        os._exit(code)


def _test(tests: Iterable[str]) -> int:
    import hypothesis
    import pytest

    os.chdir(ROOT)
    # one and the same set of examples for every mutant, and no search for the smallest that fails
    hypothesis.settings.register_profile(
        "mutation", derandomize=True, database=None, deadline=None,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    hypothesis.settings.load_profile("mutation")
    marks = "not slow and not integration and not gpu"
    there = [test for test in tests if (ROOT / test).exists()]
    preloaded = "ignore::pytest.PytestAssertRewriteWarning"
    return int(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-W", preloaded, "-m", marks, *there]))


class _Overlay(MetaPathFinder):
    """Finds one module in a file of ours."""

    def __init__(self, module: str, path: Path) -> None:
        self._module, self._path = module, path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_file_location(fullname, self._path) if fullname == self._module else None


def diff(mutant: Mutant, source: str) -> Iterator[str]:
    """The mutant as a reader sees it: the lines that go, and those that come."""
    old, new = source.splitlines(), mutant.apply(source).splitlines()
    first = next(i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])
    num_same_tail = 0
    while num_same_tail < min(len(old), len(new)) - first and old[-1 - num_same_tail] == new[-1 - num_same_tail]:
        num_same_tail += 1
    yield from (f"- {line.strip()}" for line in old[first : len(old) - num_same_tail])
    yield from (f"+ {line.strip()}" for line in new[first : len(new) - num_same_tail])
