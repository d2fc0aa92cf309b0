"""One queue of test files for all workers of pytest-xdist, the longest first by the seconds of an earlier run.

    python -m pytest -n 2 ...                                  # as `make test` does
    python -m pytest -n 2 --record-seconds ...                 # renews those seconds (tests/recorded_runs.py)

A file runs on one worker. Files that use the same fixture of scope session or package from a conftest.py, for example a
cluster, run on one worker too, so that it is made once.
"""

from __future__ import annotations

import ast
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.recorded_runs import seconds_by_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

try:
    from xdist.scheduler import LoadScopeScheduling
except ImportError:  # a run in one process needs no xdist
    LoadScopeScheduling = object

ROOT = Path(__file__).parents[1]
UNKNOWN_S = 5.0  # of a file that no recorded run had: more than most take, so that it does not begin last
WIDE = {"session", "package"}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class SharedFixtures:
    """Which test files use a costly fixture of the conftest.py of their folder, or of one above it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._groups: dict[str, str] = {}

    @cached_property
    def _by_folder(self) -> dict[Path, dict[str, str]]:
        """Folder -> fixture -> the fixture that makes what is shared."""
        return {path.parent: dict(_makers(ast.parse(path.read_text()))) for path in self._root.rglob("conftest.py")}

    def group(self, file: str) -> str:
        """A name that all files have which share what the first such fixture of this file makes; else the file's."""
        if file not in self._groups:
            self._groups[file] = self._read_group(file)
        return self._groups[file]

    def read_ahead(self, places: Iterable[str]) -> None:
        """Of the files and folders that pytest is told to run."""
        for place in places:
            path = self._root / file_of(place)
            for file in path.rglob("test_*.py"):  # of a file: none, which is one to be read later
                if file.is_relative_to(self._root):
                    self.group(str(file.relative_to(self._root)))

    def _read_group(self, file: str) -> str:
        path = self._root / file
        asked = asked_for(ast.parse(path.read_text())) if path.is_file() else set()
        for folder in path.parents:
            for name, maker in self._by_folder.get(folder, {}).items():
                if name in asked:
                    return f"{folder.relative_to(self._root)}: {maker}"
        return file


def asked_for(module: ast.Module) -> set[str]:
    """The names of all parameters of the functions of a file, but for what the file itself makes under that name."""
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    asked = {argument.arg for function in functions for argument in (*function.args.args, *function.args.kwonlyargs)}
    return asked - {function.name for function in functions}


def _makers(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Fixtures that make something and end it, and those that hand on what another makes."""
    makers: dict[str, str] = {}
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef) and _is_wide(statement):
            if any(isinstance(node, ast.Yield) for node in ast.walk(statement)):
                makers[statement.name] = statement.name
            else:
                used = (argument.arg for argument in statement.args.args if argument.arg in makers)
                makers.update((statement.name, makers[name]) for name in used)
    yield from makers.items()


def _is_wide(function: ast.FunctionDef) -> bool:
    calls = (one for one in function.decorator_list if isinstance(one, ast.Call))
    scopes = (word.value for call in calls for word in call.keywords if word.arg == "scope")
    return any(isinstance(scope, ast.Constant) and scope.value in WIDE for scope in scopes)


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
    """Hands a worker that is nearly idle the group of files that is recorded to take longest."""

    def __init__(self, config: pytest.Config, log: Any, shared: SharedFixtures) -> None:
        super().__init__(config, log)
        self._shared = shared
        self._seconds: dict[str, float] = {}

    def _split_scope(self, nodeid: str) -> str:
        return self._shared.group(file_of(nodeid))

    def remove_node(self, node: Any) -> str | None:
        """Hand out again what a worker that died had not run, and return the test that it died in: that has failed.

        xdist hands out all that the worker ever had. It so runs that test again, and a group of which all tests have
        run keeps the next worker waiting for their ends: the run never ends.
        """
        given = self.assigned_work.pop(node)
        left = {group: [test for test, has_run in tests.items() if not has_run] for group, tests in given.items()}
        died_in: str | None
        died_in, *later = [test for tests in left.values() for test in tests] or [None]
        for test in later:
            self.workqueue.setdefault(self._split_scope(test), {})[test] = False
        for other in self.assigned_work if later else ():
            self._reschedule(other)
        return died_in

    def _assign_work_unit(self, node: Any) -> None:
        if not self._seconds:
            self._seconds = seconds_of({group: list(tests) for group, tests in self.workqueue.items()})
        self.workqueue.move_to_end(max(self.workqueue, key=lambda group: self._seconds.get(group, 0.0)), last=False)
        super()._assign_work_unit(node)


def seconds_of(groups: dict[str, list[str]]) -> dict[str, float]:
    """Recorded seconds by group of tests."""
    known = seconds_by_file()
    files = {group: {*map(file_of, tests)} for group, tests in groups.items()}
    return {group: sum(known.get(file, UNKNOWN_S) for file in mine) for group, mine in files.items()}


SHARED = pytest.StashKey[SharedFixtures]()


@pytest.hookimpl(optionalhook=True, trylast=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Read the files while workers collect: they wait for their work when they have, and to read all takes 0.7 s."""
    config.stash[SHARED] = shared = SharedFixtures(ROOT)
    if config.rootpath == ROOT:
        shared.read_ahead(config.args)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LongestFirst:
    return LongestFirst(config, log, config.stash[SHARED])
