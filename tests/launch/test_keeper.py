"""Real processes that die are started again: where they were, with the sockets they had, until there is no use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from pd_cluster.launch import restarts as policy
from pd_cluster.launch import supervise
from pd_cluster.launch.keeper import Keeper, Service
from pd_cluster.launch.restarts import Restarts
from pd_cluster.launch.sockets import listen, port_of, reserve
from pd_cluster.launch.supervise import Supervisor, session_members
from pd_http.sockets import inherited
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

SERVE = """
import os, socket, sys, threading
listener = socket.socket(fileno=int(sys.argv[1]))
sys.stdout.write("ready: now\\n")
sys.stdout.flush()
while True:
    connection, _ = listener.accept()
    connection.sendall(str(os.getpid()).encode())
    connection.close()
"""
# leaves a process behind that goes on until there is a file, as an orphaned engine does for a moment
LEAVER = """
import subprocess, sys, threading
code = '''
import os, sys, time
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
open(sys.argv[1], "a").write("left ")
'''
subprocess.Popen([sys.executable, "-c", code, *sys.argv[1:]])
open(sys.argv[1], "a").write("start ")
sys.stdout.write("ready: now\\n")
sys.stdout.flush()
threading.Event().wait()
"""
# the process that it leaves behind does not end by itself
HANGER = """
import subprocess, sys, threading
subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
sys.stdout.write("ready: now\\n")
sys.stdout.flush()
threading.Event().wait()
"""
FAIL_AGAIN = """
import os, sys, threading
if os.path.exists(sys.argv[1]):
    sys.exit(7)
open(sys.argv[1], "w").close()
sys.stdout.write("ready: now\\n")
sys.stdout.flush()
threading.Event().wait()
"""
SLOW_AGAIN = FAIL_AGAIN.replace("sys.exit(7)", "threading.Event().wait()")


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """And patience where a process ends: a busy machine tells late of it."""
    monkeypatch.setattr(supervise, "KILL_WAIT_S", HANG_S)
    monkeypatch.setattr(supervise, "REMAINS_S", HANG_S)
    monkeypatch.setattr(supervise, "OUTPUT_TAIL_S", HANG_S)
    monkeypatch.setattr(policy, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(policy, "MAX_DELAY_S", 0.05)


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(test, HANG_S))


def service(name: str, code: str, *arguments: str, sockets: tuple[int, ...] = (), start_s: float = HANG_S) -> Service:
    return Service(name, (sys.executable, "-c", code, *arguments), "ready: ", start_s, sockets=sockets)


class Said:
    """Lines, and a wait for one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._changed.set()

    async def wait(self, text: str) -> None:
        while not any(text in line for line in self.lines):
            self._changed.clear()
            await self._changed.wait()


def test_connections_wait_while_the_process_is_started_again() -> None:
    async def ask(port: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        told = (await reader.read()).decode()
        writer.close()
        return told

    async def test() -> None:
        said = Said()
        async with Supervisor(lambda name, line: None) as supervisor:
            with contextlib.closing(listen("127.0.0.1", 0)) as listener:
                keeper = Keeper(supervisor, Restarts({"serve": ["a"]}), said)
                fd = listener.fileno()
                first = await keeper.start(service("a", SERVE, str(fd), sockets=(fd,)))
                await supervisor.wait_ready([first], HANG_S)
                running = asyncio.create_task(keeper.run())
                assert await ask(port_of(listener)) == str(first.pid)
                first.process.send_signal(signal.SIGKILL)
                await first.exited
                answers = await asyncio.gather(*(ask(port_of(listener)) for _ in range(20)))
                await said.wait("a is back")
                assert set(answers) == {str(supervisor.children[0].pid)}
                assert said.lines[0] == "a was killed by SIGKILL: restarting it in 0.01 s (restart 1)"
                assert len(supervisor.children) == 1, "the dead one is forgotten"
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    run(test())


def test_a_reserved_port_refuses_until_its_process_listens() -> None:
    with contextlib.closing(reserve("127.0.0.1")) as reserved:
        port = port_of(reserved)
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            with contextlib.closing(listen("127.0.0.1", port)):
                socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.long
def test_what_the_dead_process_left_running_ends_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end when the keeper has looked for it five times."""
    log, may_end = tmp_path / "log", tmp_path / "may end"
    num_looks = 0

    def look(session: int) -> list[int]:
        nonlocal num_looks
        num_looks += 1
        assert num_looks > 5 or log.read_text() == "start "
        if num_looks == 5:
            may_end.touch()
        return session_members(session)

    monkeypatch.setattr(supervise, "OUTPUT_TAIL_S", 0.05)  # which it holds open
    monkeypatch.setattr(supervise, "REMAINS_POLL_S", 0.05)

    async def test() -> None:
        said = Said()
        async with Supervisor(lambda name, line: None) as supervisor:
            keeper = Keeper(supervisor, Restarts({}), said)
            child = await keeper.start(service("a", LEAVER, str(log), str(may_end)))
            await supervisor.wait_ready([child], HANG_S)
            assert child.pid in session_members(child.pid)
            monkeypatch.setattr(supervise, "session_members", look)
            running = asyncio.create_task(keeper.run())
            child.process.send_signal(signal.SIGKILL)
            await said.wait("a is back")
            monkeypatch.setattr(supervise, "OUTPUT_TAIL_S", HANG_S)
            assert session_members(child.pid) == []
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run(test())
    assert log.read_text().startswith("start left start ")


@pytest.mark.long
def test_what_the_dead_process_left_hanging_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the output open, as an engine does; the death is seen all the same."""
    monkeypatch.setattr(supervise, "REMAINS_S", 0.1)
    monkeypatch.setattr(supervise, "OUTPUT_TAIL_S", 0.05)

    async def test() -> None:
        said = Said()
        async with Supervisor(lambda name, line: None) as supervisor:
            keeper = Keeper(supervisor, Restarts({}), said)
            child = await keeper.start(service("a", HANGER))
            await supervisor.wait_ready([child], HANG_S)
            assert len(session_members(child.pid)) == 2
            running = asyncio.create_task(keeper.run())
            child.process.send_signal(signal.SIGKILL)
            await said.wait("a is back")
            monkeypatch.setattr(supervise, "OUTPUT_TAIL_S", HANG_S)
            assert session_members(child.pid) == []
            for pid in session_members(supervisor.children[0].pid):  # the new one's remains end with this test
                os.kill(pid, signal.SIGKILL)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run(test())


@pytest.mark.long_cases
@pytest.mark.parametrize(("code", "how"), [(FAIL_AGAIN, "exited with status 7"), (SLOW_AGAIN, "was killed by SIGKILL")])
def test_starts_that_fail_end_the_run(code: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MAX_FAILED_STARTS", 2)

    async def test() -> None:
        said = Said()
        async with Supervisor(lambda name, line: None) as supervisor:
            keeper = Keeper(supervisor, Restarts({"serve": ["a"]}), said)
            child = await keeper.start(
                service("a", code, str(tmp_path / "was-here"), start_s=0.1 if code == SLOW_AGAIN else HANG_S)
            )
            await supervisor.wait_ready([child], HANG_S)
            keeper.revise("a", (*child_arguments(code, tmp_path),))
            child.process.send_signal(signal.SIGKILL)
            reason = await keeper.run()
            assert reason == f"a {how}; a has failed to start 2 times in a row"
            assert len(said.lines) == (2 if code == FAIL_AGAIN else 4), said.lines

    def child_arguments(code: str, tmp_path: Path) -> tuple[str, ...]:
        return (sys.executable, "-c", code, str(tmp_path / "was-here"))

    run(test())


def test_a_program_that_is_gone_counts_as_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MAX_FAILED_STARTS", 1)

    async def test() -> None:
        said = Said()
        async with Supervisor(lambda name, line: None) as supervisor:
            keeper = Keeper(supervisor, Restarts({"serve": ["a"]}), said)
            child = await keeper.start(service("a", "import sys; print('ready: ', flush=True); sys.stdin.read()"))
            keeper.revise("a", ("/no/such/program",))
            await supervisor.ended(child)
            assert "a cannot be started: [Errno 2]" in await keeper.run()

    run(test())


def test_only_a_listening_tcp_socket_is_inherited() -> None:
    with contextlib.closing(listen("127.0.0.1", 0)) as listener:
        fd = os.dup(listener.fileno())
        with contextlib.closing(inherited(fd)) as same:
            assert port_of(same) == port_of(listener)
            assert not same.get_inheritable()
    with contextlib.closing(reserve("127.0.0.1")) as reserved:
        for fd in (reserved.fileno(), 1_000_000):
            with pytest.raises(Exception, match=f"--listen-fd {fd}: "):
                inherited(fd)
        assert port_of(reserved) > 0, "and it is not closed"
