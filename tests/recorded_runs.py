"""What runs of the tests leave for the next ones, in files that are committed.

    --record-seconds    the seconds of each test file, to tests/seconds.json: the order of tests/work_queue.py
    --record-slow       how the slow tests of each folder ended, to tests/slow_runs.json

Both keep what is known of files and folders that did not run, or only in part: by -k, by the names of some tests, or
because the run was interrupted. CONTRIBUTING.md shows both: a run that writes one renews its tables.

A folder's slow tests may run in pieces, two at once too: a run of some of its files leaves a line for each file, and
the last file turns them into the folder's line.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections import Counter, defaultdict
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
SECONDS = TESTS / "seconds.json"
SLOW_RUNS = TESTS / "slow_runs.json"
OUTCOMES = ("passed", "failed", "skipped")
SLOW_MARK = "mark.slow"  # in the text of each file that has slow tests


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("records", "records of runs, to be committed")
    group.addoption("--record-seconds", action="store_true", help="write seconds of test files to tests/seconds.json")
    group.addoption("--record-slow", action="store_true", help="write how each folder ended to tests/slow_runs.json")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that starts workers hears of all tests
        config.pluginmanager.register(RunRecord(config), "run-record")


class RunRecord:
    """The reports of one run, summed by file."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds_wanted = bool(config.getoption("--record-seconds"))
        self._slow_wanted = bool(config.getoption("--record-slow"))
        self._seconds: dict[str, float] = defaultdict(float)
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._commit = commit() if self._slow_wanted else ""  # now: the run takes hours, and the tree may change

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        if report.when == "call" or report.outcome != "passed":  # a skip and an error of a fixture have no call
            self._outcomes[file][report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        is_whole = exitstatus in (0, 1) and not (session.shouldstop or session.shouldfail)
        if not is_whole or not self._outcomes or narrows(self._config.option, self._config.args):
            return
        if not (self._seconds_wanted or self._slow_wanted):
            return
        with alone():
            if self._seconds_wanted:
                files = {file: round(seconds, 1) for file, seconds in self._seconds.items()}
                known = {file: seconds for file, seconds in seconds_by_file().items() if (ROOT / file).is_file()}
                write(SECONDS, known | files)
            if self._slow_wanted:
                write(SLOW_RUNS, with_pieces(slow_runs(), self._slow_lines(datetime.now(UTC)), self._config.args))
            import_module("docs.generate.__main__").main(["suite"])

    def _slow_lines(self, when: datetime) -> dict[str, dict[str, Any]]:
        """By file."""
        return {
            file: {
                "on": f"{when:%Y-%m-%d}",
                "commit": self._commit,
                "seconds": round(self._seconds[file]),
                **{name: outcomes[name] for name in OUTCOMES},
            }
            for file, outcomes in self._outcomes.items()
        }


def with_pieces(
    known: Mapping[str, dict[str, Any]], pieces: Mapping[str, dict[str, Any]], arguments: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """What is known, and the lines of files that ran now. Those of a folder become one when all its files have one."""
    lines = {**known, **pieces}
    for folder in {folder_of(file) for file in pieces}:
        parts = {name for name in lines if name.endswith(".py") and folder_of(name) == folder}
        if is_whole_folder(folder, arguments):
            summed = parts & pieces.keys()
        elif parts >= slow_files(folder):
            summed = parts
        else:
            continue
        lines[folder] = total([lines[name] for name in sorted(summed)])
        lines = {name: line for name, line in lines.items() if name not in parts}
    return lines


def total(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One line: the day of the oldest piece, and the commit of each."""
    return {
        "on": min(piece["on"] for piece in pieces),
        "commit": ", ".join(sorted({piece["commit"] for piece in pieces})),
        **{name: sum(piece[name] for piece in pieces) for name in ("seconds", *OUTCOMES)},
    }


def slow_files(folder: str) -> set[str]:
    """By their text: a run of some files has collected no others."""
    files = {str(path.relative_to(ROOT)): path for path in (ROOT / folder).rglob("test_*.py")}
    return {name for name, path in files.items() if folder_of(name) == folder and SLOW_MARK in path.read_text()}


@contextmanager
def alone() -> Iterator[None]:
    """No other run that ends now reads or writes the records meanwhile."""
    folder = os.open(TESTS, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def narrows(options: Any, arguments: Sequence[str]) -> bool:
    """Some tests of a file may have been left out: the record of a file or folder is of all."""
    return bool(options.keyword or options.deselect or getattr(options, "lf", False)) or any(
        "::" in one for one in arguments
    )


def is_whole_folder(folder: str, arguments: Sequence[str]) -> bool:
    """All files of a folder of the tests are among the arguments of pytest."""
    return any((ROOT / folder).is_relative_to(Path(one).resolve()) for one in arguments)


def folder_of(file: str) -> str:
    """`tests/security` of `tests/security/test_chaos.py`; `tests` of a file there."""
    return "/".join(file.split("/")[:-1][:2])


def seconds_by_file() -> dict[str, float]:
    """As the last recorded run took them."""
    return read(SECONDS)


def slow_runs() -> dict[str, dict[str, Any]]:
    """Folder -> how its slow tests ended when they ran last; file -> the same, of a run of some files of a folder."""
    return read(SLOW_RUNS)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def write(path: Path, lines: Mapping[str, Any]) -> None:
    """One line a key, so that two records merge and differ by lines."""
    rows = [f"{json.dumps(key)}: {json.dumps(lines[key])}" for key in sorted(lines)]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def commit() -> str:
    """Of the tree that runs; with a plus if files differ from it. "unknown" outside of a clone."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    ours = [f":(exclude){name}" for name in ("tests/seconds.json", "tests/slow_runs.json", "CONTRIBUTING.md")]
    try:
        return git("rev-parse", "--short=8", "HEAD") + ("+" if git("status", "--porcelain", "--", ".", *ours) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
