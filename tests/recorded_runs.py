"""What runs of the tests leave for the next ones, in files that are committed.

    --record-seconds    the seconds of each test file, to tests/seconds.json: the order of tests/work_queue.py
    --record-slow       how the slow tests of each folder ended, to tests/slow_runs.json

Both keep what is known of files and folders that did not run, or only in part: by -k, by the names of some tests, or
because the run was interrupted. CONTRIBUTING.md shows both: a run that writes one renews its tables.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter, defaultdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
SECONDS = TESTS / "seconds.json"
SLOW_RUNS = TESTS / "slow_runs.json"


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
            self._outcomes[folder_of(file)][report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        is_whole = exitstatus in (0, 1) and not (session.shouldstop or session.shouldfail)
        if not is_whole or not self._outcomes or narrows(self._config.option, self._config.args):
            return
        if self._seconds_wanted:
            files = {file: round(seconds, 1) for file, seconds in self._seconds.items()}
            known = {file: seconds for file, seconds in seconds_by_file().items() if (ROOT / file).is_file()}
            write(SECONDS, known | files)
        if self._slow_wanted and (lines := self._slow_lines(datetime.now(UTC))):
            write(SLOW_RUNS, slow_runs() | lines)
        if self._seconds_wanted or self._slow_wanted:
            import_module("docs.generate.__main__").main(["suite"])

    def _slow_lines(self, when: datetime) -> dict[str, dict[str, Any]]:
        whole = {folder for folder in self._outcomes if is_whole_folder(folder, self._config.args)}
        seconds: Counter[str] = Counter()
        for file, took_s in self._seconds.items():
            seconds[folder_of(file)] += took_s  # type: ignore[assignment]
        return {
            folder: {
                "on": f"{when:%Y-%m-%d}",
                "commit": self._commit,
                "seconds": round(seconds[folder]),
                **{name: outcomes[name] for name in ("passed", "failed", "skipped")},
            }
            for folder, outcomes in self._outcomes.items()
            if folder in whole
        }


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
    """Folder -> how its slow tests ended when they ran last."""
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
