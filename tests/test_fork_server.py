"""The fork server: its children are like processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.cluster import FORK_SERVER, ROOT, Launched, Launcher, base_environment
from tests.deadlines import HANG_S, wait_until
from tests.fork_server import ForkServer, ForkServerDied, SharedForks
from tests.forked_command import ENGINE_HOOK_ENV

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOWN = "tests.shown_process"

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One that imports nothing, and so is there at once."""
    server = ForkServer(base_environment, ROOT, "none")
    yield server
    server.close()


def run(server: ForkServer, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, list[str]]:
    """Exit status and lines of output."""
    child = Launched("child", server.start(arguments, environment or base_environment(), ROOT, SHOWN))
    status = child.wait()
    return status, child.lines


def test_a_child_is_like_a_process_of_its_own(server: ForkServer, launcher: Launcher, tmp_path: Path) -> None:
    environment = {**base_environment(), "PD_ADDED": "ä and \udcff"}
    del environment["HOME"]
    forked = Launched("forked", server.start(["show", "5"], environment, tmp_path, SHOWN))
    command = [sys.executable, "-m", SHOWN, "show", "5"]
    executed = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, cwd=tmp_path, process_group=0
    )
    assert (forked.wait(), executed.returncode) == (5, 5)
    told, expected = (json.loads(lines[0]) for lines in (forked.lines, executed.stdout.splitlines()))
    assert (told["threads"], told["environment"]) == (1, environment)
    assert told == expected
    assert forked.lines[1:] == ["the end"]


def test_children_of_the_server_of_all_commands_share_no_thread_and_no_random_numbers() -> None:
    (first, second), (_, lines) = (
        [json.loads(run(FORK_SERVER, "draw", "0")[1][0]) for _ in range(2)],
        run(FORK_SERVER, "show", "0"),
    )
    assert len(first) == len(second) == 3
    assert not set(first) & set(second)
    told = json.loads(lines[0])
    assert (told["threads"], [*told["files"]], told["inheritable"]) == (1, ["0", "1", "2"], ["0", "1", "2"])


def test_an_error_is_told_and_ends_the_process_with_status_1(server: ForkServer) -> None:
    status, lines = run(server, "fail")
    assert status == 1
    assert "Traceback (most recent call last):" in lines
    assert lines[-2:] == ["RuntimeError: as it was told", "the end"]


def test_signals_and_waits(server: ForkServer) -> None:
    child = server.start(["sleep"], base_environment(), ROOT, SHOWN)
    launched = Launched("asleep", child)
    launched.wait_line("asleep")
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    assert psutil.Process(child.pid).cmdline() == [sys.executable, "-m", SHOWN, "sleep"]
    child.send_signal(signal.SIGKILL)
    assert child.wait() == child.poll() == -signal.SIGKILL
    child.kill()  # harmless
    assert not psutil.pid_exists(child.pid)


def test_threads_start_commands_at_once(server: ForkServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda number: run(server, "draw", str(number))[0], range(32))]
    assert found == [*range(32)]


def test_a_server_that_died_is_named_with_what_it_wrote_and_replaced() -> None:
    server = ForkServer(base_environment, ROOT, "no such modules")
    with pytest.raises(ForkServerDied, match="no such modules"):
        server.start(["draw", "0"], base_environment(), ROOT, SHOWN)
    server = ForkServer(base_environment, ROOT, "none")
    child = server.start(["sleep"], base_environment(), ROOT, SHOWN)
    psutil.Process(psutil.Process(child.pid).ppid()).kill()
    with pytest.raises(ForkServerDied, match="ended with status -9"):
        server.start(["draw", "0"], base_environment(), ROOT, SHOWN)
    child.kill()
    with pytest.raises(ForkServerDied):
        child.wait()
    assert run(server, "draw", "3")[0] == 3
    child.stdout.close()
    server.close()


def test_a_launcher_ends_all_that_it_started_when_the_server_died() -> None:
    server, launcher = ForkServer(base_environment, ROOT, "none"), Launcher()
    first, second = (launcher._add("child", server.start(["sleep"], base_environment(), ROOT, SHOWN)) for _ in range(2))
    processes = [psutil.Process(one.pid) for one in (first, second)]
    first.wait_line("asleep")
    processes[0].parent().kill()
    processes[1].kill()
    with pytest.raises(AssertionError, match="the fork server ended with status -9"):
        launcher.close()
    assert psutil.wait_procs(processes, timeout=HANG_S)[1] == []
    assert launcher._launched == []


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Where the path of a socket fits: it has 107 bytes, and TMPDIR may be long."""
    with tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp") as folder:
        yield Path(folder)


def test_an_address_is_that_of_the_ready_line(launcher: Launcher) -> None:
    """Others say that a part is ready, or name an address."""
    lines = "254 of 254 blocks ready after 0.2 s", "node d0 (http://d0) is healthy", "ready: node on http://here (d0)"
    launched = launcher.start("node", [sys.executable, "-c", f"print({chr(10).join(lines)!r})"])
    assert launched.url == "http://here"
    assert launched.wait() == 0


def test_workers_share_a_server_and_each_takes_its_own_children_along(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = base_environment()
    shared = SharedForks(short_path, environment, ROOT, "none")
    for name, value in shared.variables.items():
        monkeypatch.setenv(name, value)
    one, other = (ForkServer(dict, ROOT) for _ in range(2))
    assert one.environment == environment
    leaves, stays, outlives = (
        server.start(["sleep"], base_environment(), ROOT, SHOWN) for server in (one, other, other)
    )
    assert psutil.Process(leaves.pid).ppid() == psutil.Process(stays.pid).ppid()
    one.close()
    assert leaves.wait(HANG_S) == -signal.SIGTERM
    assert stays.poll() is None
    stays.kill()
    assert stays.wait() == -signal.SIGKILL
    assert run(other, "draw", "3")[0] == 3
    child = psutil.Process(outlives.pid)
    shared.close()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(ForkServerDied, match="of all workers is left"):
        other.start(["sleep"], base_environment(), ROOT, SHOWN)
    for each in (leaves, stays, outlives):
        each.stdout.close()


def test_the_server_of_all_commands_has_the_environment_of_commands() -> None:
    """Else each command of this run is executed, which takes ten times as long."""
    assert FORK_SERVER.differs(base_environment()) == set()


def test_a_child_ends_when_its_client_gave_up_before_it_began(server: ForkServer) -> None:
    """By a test's timeout, for example."""
    last = server.start(["sleep"], base_environment(), ROOT, SHOWN)
    parent = psutil.Process(last.pid).parent()
    assert parent is not None
    parent.suspend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "recv_fds", interrupt)
        with pytest.raises(KeyboardInterrupt):
            server.start(["sleep"], base_environment(), ROOT, SHOWN)
    parent.resume()
    assert run(server, "draw", "3")[0] == 3  # orders are taken in turn
    wait_until(lambda: [one.pid for one in parent.children()] == [last.pid], lambda: parent.children())
    last.kill()
    last.wait()
    last.stdout.close()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_server_and_its_children_end_with_its_client_however_that_ends() -> None:
    code = (
        "from tests.cluster import *; s = ForkServer(base_environment, ROOT, 'none');"
        f"c = s.start(['sleep'], base_environment(), ROOT, '{SHOWN}'); c.stdout.readline();"
        "print(c.pid, flush=True); c.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=base_environment()) as client:
        assert client.stdout is not None
        child = psutil.Process(int(client.stdout.readline()))
        server = child.parent()
        client.kill()
    psutil.wait_procs([server], timeout=HANG_S)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_variable_that_may_matter_to_an_import_needs_a_process_of_its_own() -> None:
    environment = {**base_environment(), "PD_ANY": "1", "UCX_TLS": "tcp", "PYTEST_CURRENT_TEST": "another"}
    server = ForkServer(base_environment, ROOT)
    assert server.differs(environment) == set()
    assert server.differs({**environment, "TORCHINDUCTOR_CACHE_DIR": "set by torch"}) == set()
    del environment["HOME"]
    assert server.differs({**environment, "OMP_NUM_THREADS": "2"}) == {"HOME", "OMP_NUM_THREADS"}


API = """
import sys
from importlib import import_module
from pkgutil import walk_packages

import pd_cluster.server, pd_http
from pd_cluster.launch.node_process import leave_out_torch
from tests.forked_command import MODULES

leave_out_torch()
names = [name for name in MODULES if name.startswith("transformers.")]
for package in (pd_cluster.server, pd_http):
    names += [module.name for module in walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    import_module(name)
assert sys.modules["torch"] is None
"""


def test_what_the_api_process_imports_needs_no_torch() -> None:
    """A forked one has torch."""
    done = subprocess.run([sys.executable, "-c", API], env=base_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def say_what_the_engine_is() -> None:
    """Called in an engine before it starts."""
    from tests.shown_process import shown

    sys.stdout.write(json.dumps({**shown(), "parent": os.getppid()}) + "\n")


def test_a_nodes_engine_is_its_child_and_calls_the_hook(launcher: Launcher) -> None:
    hook = f"{__name__}:{say_what_the_engine_is.__name__}"
    node = launcher.node("mixed", "--kv-cache-gb=0.05", environment={ENGINE_HOOK_ENV: hook})
    told: dict[str, Any] = json.loads(node.wait_line('"parent"'))
    assert (told["parent"], told["threads"], [*told["files"]]) == (node.pid, 1, ["0", "1", "2"])
    [engine] = psutil.Process(node.pid).children()
    assert engine.cmdline()[:4] == [sys.executable, "-P", "-m", "pd_cluster.engine.process"]
    assert psutil.Process(node.pid).cmdline()[:4] == [sys.executable, "-m", "pd_cluster.launch.cli", "mixed"]
    assert node.stop() == 0
    assert node.leftovers() == []


SPARE = f"""
import os, subprocess, sys
from tests.forked_command import Spare
def become(told):
    print(told["b"], input(), flush=True)
    sys.stdin.read()
    os._exit(7)
child = Spare("process", become).spawn({{"a": 1}}, b="B")
try:
    child.wait(0.0)
except subprocess.TimeoutExpired:
    child.stdin.close()
assert child.wait({HANG_S}) == child.poll() == 7
"""


def test_a_spare_process_is_waited_for_as_one_of_subprocess() -> None:
    done = subprocess.run([sys.executable, "-c", SPARE], env=base_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, 'B {"a":1}\n'), done.stderr


def test_a_node_that_starts_no_engine_leaves_no_spare_one(launcher: Launcher) -> None:
    node = launcher.node("mixed", "--block-size=-1", wait=False)
    node.family()
    assert node.wait() == 2
    assert node.leftovers() == []
    assert node.output.count("\n") < 4, node.output
