"""Workers forked from one that has collected: they are like processes of their own, and what they are not is said."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.cluster import READY_DEADLINE_S
from tests.deadlines import HANG_S, wait_until
from tests.forked_worker import MANY_TESTS, PLUGIN, READ_ALL, is_told, load_models
from tests.forked_workers import ROOT

if TYPE_CHECKING:
    from pathlib import Path

TELLS = """
import json, os, random, sys, tempfile, threading, time
import numpy, pytest

IMPORTED_BY = os.getpid()

@pytest.mark.parametrize("number", range(2))
def test_it(number, tmp_path, worker_id, capfd):
    os.system("echo out; echo err >&2")
    assert capfd.readouterr() == ("out\\n", "err\\n")
    told = {"imported by": IMPORTED_BY, "parent": os.getppid(), "worker": worker_id, "folder": str(tmp_path)}
    told["environment"] = os.environ["PYTEST_XDIST_WORKER"]
    told["drawn"] = [random.random(), numpy.random.random(), next(tempfile._get_candidate_names())]
    told["threads"] = [thread.name for thread in threading.enumerate()]
    told["files"] = {number: file_of(number) for number in os.listdir("/proc/self/fd")}
    told["main"], told["argv"] = vars(sys.modules["__main__"]).get("__file__"), sys.argv
    open(os.path.join(os.environ["LOG"], f"{worker_id}-{number}"), "w").write(json.dumps(told))
    # both have their files open: a number of one that is closed is used again, and would be the same name
    other = {"gw0": "gw1", "gw1": "gw0"}[worker_id]
    end_s = time.monotonic() + 60
    while not os.path.exists(os.path.join(os.environ["LOG"], f"{other}-{number}")):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    os.system("echo printed by the child of " + worker_id)
    assert number == 0

def file_of(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""
"""


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> subprocess.Popen[str]:
    """Its tests with two workers, which log to this folder."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # else it imports all plugins, for a second each time
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LOG", str(folder))
    plugins = ["-p", "xdist", "-p", "tests.forked_workers", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-n2", "--dist=loadfile", *plugins, *more, f"--rootdir={folder}"]
    return subprocess.Popen(
        [*command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[int, str]:
    """Exit status and output."""
    with start(folder, monkeypatch, *more) as process:
        output, _ = process.communicate(timeout=READY_DEADLINE_S)
    return process.returncode, output


@pytest.mark.long
def test_workers_are_forked_after_one_collection_and_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        (tmp_path / f"test_{name}.py").write_text(TELLS)
    status, output = run(tmp_path, monkeypatch)
    assert status == 1, output
    assert "2 failed, 2 passed" in output
    assert all(output.count(f"printed by the child of {worker}") == 1 for worker in ("gw0", "gw1")), output
    one, two = told = [json.loads((tmp_path / f"{worker}-0").read_text()) for worker in ("gw0", "gw1")]
    assert one["imported by"] == two["imported by"] == one["parent"] == two["parent"]
    for name in ("worker", "environment", "folder", "drawn"):
        assert one[name] != two[name]
    assert not {*one["drawn"]} & {*two["drawn"]}
    for each in told:
        assert each["worker"] == each["environment"]
        assert f"popen-{each['worker']}" in each["folder"]
        assert each["threads"] == ["MainThread", "xdist"]
        assert (each["main"], each["argv"]) == (None, ["-c"])
    shared = {*one["files"].values()} & {*two["files"].values()}
    assert [name for name in shared if not name.startswith(("/dev/null", "pipe:"))] in ([], [""])


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "said", "status"),
    [
        (
            "import threading\nkept = open(__file__)\n"
            "threading.Thread(target=threading.Event().wait, daemon=True).start()",
            r"left open: \['[^']+', '\d+ /\S+/test_two.py'\]",  # a thread and a file
            0,
        ),
        ("import no_such_module", "No module named 'no_such_module'", 1),
        ("import os; os._exit(3) if 'PYTEST_XDIST_WORKER' not in os.environ else None", "passed", 0),
    ],
)
def test_what_cannot_be_forked_is_said_and_runs_all_the_same(
    text: str, said: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): pass")
    (tmp_path / "test_two.py").write_text(f"{text}\ndef test_two(): pass")
    ended, output = run(tmp_path, monkeypatch)
    assert ended == status, output
    assert re.search(said, output), output
    assert ("1 passed, 1 error" if status else "2 passed") in output


@pytest.mark.long
def test_no_worker_stays_when_the_run_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, signal\ndef test_it():\n  open(os.environ['LOG'] + '/log', 'a').write('x')\n  signal.pause()\n"
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(code)
    with start(tmp_path, monkeypatch) as process:
        log = tmp_path / "log"
        wait_until(lambda: log.exists() and log.read_text() == "xx")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 5, "two stand-ins, the process that forks and two workers"
        os.kill(process.pid, signal.SIGKILL)
    assert psutil.wait_procs(family, timeout=HANG_S)[1] == []


def test_what_nothing_reads_of_a_test_is_not_told() -> None:
    def told(when: str, outcome: str = "passed", sections: tuple[str, ...] = (), name: str = "testreport") -> bool:
        return is_told(SimpleNamespace(), name, {"data": {"when": when, "outcome": outcome, "sections": sections}})

    assert [told(when) for when in ("setup", "call", "teardown")] == [False, True, False]
    assert all(told(when, outcome) for when in ("setup", "teardown") for outcome in ("failed", "skipped"))
    assert told("teardown", sections=("printed",))
    assert told("setup", name="logstart")
    passed = {"data": {"when": "setup", "outcome": "passed", "sections": []}}
    for value, is_asked in (("1", True), (True, True), (0, True), (None, False), (False, False)):
        for option in READ_ALL:
            assert is_told(SimpleNamespace(**{option: value}), "testreport", passed) == is_asked, (option, value)


def test_quick_tests_wait_for_no_import_of_models() -> None:
    def tests(*marks: str) -> Any:
        return [SimpleNamespace(get_closest_marker=partial(re.fullmatch, mark)) for mark in marks]

    many, few = [""] * MANY_TESTS, [""] * (MANY_TESTS - 2)
    assert not load_models(tests(*many))
    assert load_models(tests("long", *many))
    assert not load_models(tests("long", *few))


def test_this_worker_is_forked(request: pytest.FixtureRequest) -> None:
    """So the collection of all tests leaves no thread and no file open."""
    plugins: Any = request.config.pluginmanager
    if not hasattr(request.config, "workerinput") or plugins.is_blocked("tests.forked_workers"):
        pytest.skip("this process was not started as a forked worker")
    assert plugins.has_plugin(PLUGIN), "see the first lines of the run"
