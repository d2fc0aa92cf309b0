"""The queue of test files: longest first, what shares a cluster together, and a test that fails fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from docs.generate import __main__ as generate
from tests import recorded_runs, work_queue
from tests.cluster import READY_DEADLINE_S
from tests.conftest import pytest_collection_modifyitems
from tests.deadlines import SLOW_HANG_S
from tests.recorded_runs import ROOT, folder_of
from tests.work_queue import UNKNOWN_S, SharedFixtures, seconds_of

if TYPE_CHECKING:
    from pathlib import Path

CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def cluster():
    yield 1

@pytest.fixture(scope="session")
def part(cluster):
    return cluster

@pytest.fixture
def cheap():
    yield 2

@pytest.fixture(scope="session")
def number():
    return 3
"""
FILES = {
    "test_uses.py": "def test_one(cluster): pass",
    "test_uses_part.py": "async def test_two(*, part): pass",
    "test_makes_its_own.py": "def cluster(): pass\ndef test_three(cluster): pass",
    "test_cheap.py": "def test_four(cheap, number): pass",
    "test_speaks_of_it.py": "def test_five(): assert 'cluster'",
}


def test_files_that_share_a_cluster_are_one_group(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "deep" / "er"
    folder.mkdir(parents=True)
    (tmp_path / "tests" / "deep" / "conftest.py").write_text(CONFTEST)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    shared = SharedFixtures(tmp_path)
    groups = {name: shared.group(f"tests/deep/er/{name}") for name in FILES}
    assert groups.pop("test_uses.py") == groups.pop("test_uses_part.py") == "tests/deep: cluster"
    assert groups == {name: f"tests/deep/er/{name}" for name in groups}, "each alone"
    assert shared.group("not/there.py") == "not/there.py"


def test_files_of_folders_are_read_ahead(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "deep"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_uses.py").write_text(FILES["test_uses.py"])
    shared = SharedFixtures(tmp_path)
    shared.read_ahead(["tests/deep", "tests/deep/test_later.py::one", "elsewhere", "/proc/self/fdinfo"])
    (folder / "test_uses.py").unlink()
    (folder / "test_later.py").write_text(FILES["test_uses_part.py"])
    assert {shared.group(f"tests/deep/{name}.py") for name in ("test_uses", "test_later")} == {"tests/deep: cluster"}


def test_groups_take_the_sum_of_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "seconds_by_file", lambda: {"a.py": 3.0, "b.py": 4.5})
    groups = {"both": ["a.py::one", "a.py::two", "b.py::one"], "new": ["c.py::one[x::y]"]}
    assert seconds_of(groups) == {"both": 7.5, "new": UNKNOWN_S}


TESTS = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_of_this_file(number, worker_id, tmp_path_factory):
    with open({log!r}, "a") as log:
        log.write(f"{name} {{worker_id}}\\n")
    assert number != {wrong}
"""


def run_pytest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> subprocess.CompletedProcess[str]:
    """Its tests with two workers and this queue."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # else it imports all plugins, for a second each time
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    plugins = ["-p", "xdist", "-p", "tests.work_queue", "-p", "tests.forked_workers", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-n2", *plugins, f"--rootdir={folder}", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=READY_DEADLINE_S)


@pytest.mark.long
def test_workers_take_files_whole_and_a_test_that_fails_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs it again."""
    log = tmp_path / "log"
    for name in ("first", "second", "third"):
        text = TESTS.format(log=str(log), name=name, wrong=2 if name == "second" else -1)
        (tmp_path / f"test_{name}.py").write_text(text)
    done = run_pytest(tmp_path, monkeypatch)
    assert done.returncode == 1, done.stdout
    assert "1 failed, 11 passed" in done.stdout
    lines = log.read_text().splitlines()
    assert len(lines) == 12, "each test once"
    assert len({*lines}) == 3, "each file on one worker"


DIES = """
import os

def test_before(): pass
def test_that_dies(): os._exit(7)
def test_after(): open({log!r}, "a").write("after\\n")
"""


@pytest.mark.long
def test_a_worker_that_dies_fails_one_test_and_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had run before is not handed out again, nor is that test."""
    log = tmp_path / "log"
    names = [f"file_{number}" for number in range(9)]
    for name in names:
        (tmp_path / f"test_{name}.py").write_text(TESTS.format(log=str(log), name=name, wrong=-1))
    (tmp_path / "test_file_4_dies.py").write_text(DIES.format(log=str(log)))
    done = run_pytest(tmp_path, monkeypatch)
    assert done.returncode == 1, done.stdout
    assert "1 failed, 38 passed" in done.stdout
    assert "crashed while running 'test_file_4_dies.py::test_that_dies'" in done.stdout
    lines = [line.split()[0] for line in log.read_text().splitlines()]
    assert sorted(lines) == sorted(["after", *4 * names])


@pytest.mark.parametrize(("own_s", "longest_s"), [(None, SLOW_HANG_S), (5.0, SLOW_HANG_S), (9e9, 9e9)])
def test_a_slow_test_ends_only_when_it_hangs(
    own_s: float | None, longest_s: float, request: pytest.FixtureRequest
) -> None:
    slow, other = (pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None) for name in "ab")
    slow.add_marker("slow")
    for item in (slow, other):
        if own_s:
            item.add_marker(pytest.mark.timeout(own_s))
    pytest_collection_modifyitems([slow, other])
    found = [item.get_closest_marker("timeout") for item in (slow, other)]
    assert [one and one.args for one in found] == [(longest_s,), own_s and (own_s,)]


def test_no_plugin_runs_a_failed_test_again() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    told = [*project["project"]["optional-dependencies"]["dev"], project["tool"]["pytest"]["ini_options"]["addopts"]]
    told += (ROOT / "Makefile").read_text().splitlines()
    assert [line for line in told if re.search(r"rerun|flaky|--lf|--last-failed|second_try", line)] == []


def test_a_record_keeps_what_did_not_run(tmp_path: Path) -> None:
    path = tmp_path / "seconds.json"
    recorded_runs.write(path, {"b.py": 1.5, "a.py": 2.0})
    assert path.read_text() == '{\n"a.py": 2.0,\n"b.py": 1.5\n}\n'
    assert recorded_runs.read(path) == {"a.py": 2.0, "b.py": 1.5}
    assert recorded_runs.read(tmp_path / "none.json") == {}


def finish(arguments: list[str], exitstatus: int = 0, **options: Any) -> dict[Path, set[str]]:
    """Let a run of two tests end; what it writes, by file."""
    written: dict[Path, set[str]] = {}
    chosen = SimpleNamespace(**{"keyword": "", "deselect": None, "lf": False, **options})
    config: Any = SimpleNamespace(
        getoption=lambda name: True, option=chosen, args=[str(ROOT / one) for one in arguments]
    )
    reports = [
        SimpleNamespace(nodeid=f"tests/{file}::test_it[a]", duration=1.0, when="call", outcome="passed")
        for file in ("router/test_x.py", "integration/deep/test_y.py")
    ]
    session: Any = SimpleNamespace(shouldstop=False, shouldfail=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_runs, "write", lambda path, lines: written.update({path: {*lines}}))
        patch.setattr(recorded_runs, "read", lambda path: {})
        patch.setattr(generate, "main", lambda names: None)
        record = recorded_runs.RunRecord(config)
        for report in reports:
            record.pytest_runtest_logreport(cast("Any", report))
        record.pytest_sessionfinish(session, exitstatus)
    return written


def test_a_run_of_a_part_leaves_the_records_as_they_are() -> None:
    files = {"tests/router/test_x.py", "tests/integration/deep/test_y.py"}
    folders = {"tests/router", "tests/integration"}
    for status in (0, 1):
        assert finish(["tests"], status) == {recorded_runs.SECONDS: files, recorded_runs.SLOW_RUNS: folders}
    assert finish(["tests/router", "tests/integration/deep"]) == {
        recorded_runs.SECONDS: files,
        recorded_runs.SLOW_RUNS: {"tests/router", "tests/integration/deep/test_y.py"},
    }  # fmt: skip
    for interrupted in (2, 3, 4, 5):
        assert finish(["tests"], interrupted) == {}
    assert finish(["tests"], keyword="x") == finish(["tests"], lf=True) == finish(["tests/test_x.py::test_it"]) == {}


def line_of(on: str, commit: str, **counts: int) -> dict[str, Any]:
    return {"on": on, "commit": commit} | dict.fromkeys(("seconds", "passed", "failed", "skipped"), 0) | counts


def test_runs_of_all_files_of_a_folder_become_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that runs again counts once; the last one makes the folder's line, and a whole run drops them."""
    monkeypatch.setattr(recorded_runs, "ROOT", tmp_path)
    folder = tmp_path / "tests" / "router"
    (folder / "deep").mkdir(parents=True)
    for name, text in {"test_a.py": "mark.slow", "deep/test_b.py": "mark.slow", "test_c.py": "mark.long"}.items():
        (folder / name).write_text(text)
    first, second = "tests/router/test_a.py", "tests/router/deep/test_b.py"
    others = {"tests/server": line_of("2026-01-01", "11111111", passed=1)}
    old = {"tests/router": line_of("2026-01-01", "22222222", failed=3)}
    pieces = [line_of("2026-02-02", "33333333", seconds=5, failed=1), line_of("2026-02-03", "33333333", passed=2)]
    known = recorded_runs.with_pieces(others | old, {first: pieces[0]}, [])
    known = recorded_runs.with_pieces(known, {first: pieces[1]}, [])
    assert known == others | old | {first: pieces[1]}
    last = line_of("2026-02-04", "44444444", seconds=7, passed=1, skipped=2)
    both = line_of("2026-02-03", "33333333, 44444444", seconds=7, passed=3, skipped=2)
    assert recorded_runs.with_pieces(known, {second: last}, []) == others | {"tests/router": both}
    assert recorded_runs.with_pieces(known, {second: last}, [str(folder)]) == others | {"tests/router": last}


def test_files_with_slow_tests_are_known_by_their_text() -> None:
    assert "tests/integration/faults/test_faults_nodes.py" in recorded_runs.slow_files("tests/integration")
    assert recorded_runs.slow_files("tests/benchmarks") == set()


def test_a_run_outside_of_a_clone_has_a_record_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"[0-9a-f]{8,}\+?|unknown", recorded_runs.commit())
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(recorded_runs, "ROOT", tmp_path)
    assert recorded_runs.commit() == "unknown"


def test_recorded_files_exist() -> None:
    """A file that was renamed takes its seconds along, or it begins too late."""
    known = recorded_runs.seconds_by_file()
    assert [file for file in known if not (ROOT / file).is_file()] == []


def test_folders_are_the_first_two_parts() -> None:
    assert folder_of("tests/integration/faults/test_x.py") == "tests/integration"
    assert folder_of("tests/test_house.py") == "tests"


def test_records_are_lines_that_merge() -> None:
    for path in (recorded_runs.SECONDS, recorded_runs.SLOW_RUNS):
        text = path.read_text()
        keys = [line.partition(":")[0] for line in text.splitlines()[1:-1]]
        assert keys == sorted(keys)
        assert json.loads(text).keys() == {json.loads(key) for key in keys}
