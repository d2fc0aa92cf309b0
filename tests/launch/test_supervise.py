"""Children of `pd-cluster up`: awaited, watched, ended in time."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from pd_cluster.errors import StartupError
from pd_cluster.launch import supervise
from pd_cluster.launch.supervise import Supervisor, describe_death
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Coroutine

READY = "import sys, threading; sys.stdout.write('x ready: now\\n'); sys.stdout.flush(); "
WAIT = "threading.Event().wait()"
POLITE = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " + READY + WAIT
STUBBORN = "import signal; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGINT)]; " + READY + WAIT


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a child that was killed, or has ended: a busy machine tells late of its end and of its last lines."""
    monkeypatch.setattr(supervise, "KILL_WAIT_S", HANG_S)
    monkeypatch.setattr(supervise, "OUTPUT_TAIL_S", HANG_S)


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(test, HANG_S))


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.long
def test_ready_lines_and_output() -> None:
    shown: list[tuple[str, str]] = []

    async def test() -> None:
        async with Supervisor(lambda name, line: shown.append((name, line))) as supervisor:
            children = [await supervisor.start(name, python("import sys; " + POLITE), "ready: ", {}) for name in "ab"]
            await supervisor.wait_ready(children, HANG_S)
            assert [child.ready.result() for child in children] == ["x ready: now"] * 2
            assert await supervisor.stop(children, HANG_S) == []
            assert [child.process.returncode for child in children] == [0, 0]

    run(test())
    assert sorted(shown) == [("a", "x ready: now"), ("b", "x ready: now")]


def test_a_child_that_dies_before_it_is_ready() -> None:
    shown: list[str] = []

    async def test() -> None:
        async with Supervisor(lambda name, line: shown.append(line)) as supervisor:
            code = "import sys; sys.stderr.write('no such device\\n'); sys.exit(7)"
            child = await supervisor.start("a", python(code), "ready: ", {})
            with pytest.raises(StartupError, match="a exited with status 7 before it was ready"):
                await supervisor.wait_ready([child], HANG_S)

    run(test())
    assert shown == ["no such device"]


def test_a_child_that_is_not_ready_in_time() -> None:
    async def test() -> None:
        async with Supervisor(lambda name, line: None) as supervisor:
            child = await supervisor.start("slow", python("import threading; " + WAIT), "ready: ", {})
            with pytest.raises(StartupError, match=r"not ready after 0\.05 s: slow"):
                await supervisor.wait_ready([child], 0.05)

    run(test())


@pytest.mark.long
def test_the_first_death_is_reported() -> None:
    async def test() -> None:
        async with Supervisor(lambda name, line: None) as supervisor:
            children = [await supervisor.start(name, python("import sys; " + POLITE), "ready: ", {}) for name in "ab"]
            await supervisor.wait_ready(children, HANG_S)
            children[1].process.send_signal(signal.SIGKILL)
            dead = await supervisor.first_death()
            assert dead is children[1]
            assert describe_death(dead) == "b was killed by SIGKILL"

    run(test())


@pytest.mark.parametrize("in_a_hurry", [False, True])
def test_what_does_not_stop_is_killed(in_a_hurry: bool) -> None:
    async def test() -> None:
        hurry = asyncio.Event()
        if in_a_hurry:
            hurry.set()
        async with Supervisor(lambda name, line: None) as supervisor:
            child = await supervisor.start("a", python("import sys; " + STUBBORN), "ready: ", {})
            await supervisor.wait_ready([child], HANG_S)
            killed = await supervisor.stop([child], 0.05, hurry)
            assert killed == [child]
            assert describe_death(child) == "a was killed by SIGKILL"

    run(test())


def test_leaving_the_block_ends_all_processes() -> None:
    pids: list[int] = []

    async def fail() -> None:
        async with Supervisor(lambda name, line: None) as supervisor:
            child = await supervisor.start("a", python("import sys; " + STUBBORN), "ready: ", {})
            pids.append(child.pid)
            raise RuntimeError("our own bug")

    with pytest.raises(RuntimeError, match="our own bug"):
        run(fail())
    assert not psutil.pid_exists(pids[0])


def test_leaving_the_block_ends_what_a_dead_child_has_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """An API process that was killed, and its engine, which hangs and holds its output open."""
    monkeypatch.setattr(supervise, "OUTPUT_TAIL_S", 0.05)
    sleeper = "import os, sys, subprocess; one = subprocess.Popen(['sleep', '600'], stdin=subprocess.DEVNULL); "
    code = sleeper + "sys.stdout.write(f'x ready: {one.pid}\\n'); sys.stdout.flush(); os._exit(1)"
    left: list[psutil.Process] = []

    async def test() -> None:
        async with Supervisor(lambda *_: None) as supervisor:
            child = await supervisor.start("a", python(code), "ready: ", {})
            await supervisor.first_death()
            monkeypatch.setattr(supervise, "OUTPUT_TAIL_S", HANG_S)
            left.append(psutil.Process(int((await child.ready).rpartition(" ")[2])))
            assert left[0].is_running()

    run(test())
    assert not psutil.wait_procs(left, timeout=HANG_S)[1]


def test_a_death_is_noticed_where_pidfds_are_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    async def test() -> None:
        async with Supervisor(lambda *_: None) as supervisor:
            child = await supervisor.start("a", python("import sys; sys.exit(7)"), "ready: ", {})
            monkeypatch.setattr("pd_cluster.launch.supervise.os.pidfd_open", refuse)
            assert await supervisor.first_death() is child
            assert describe_death(child) == "a exited with status 7"
        monkeypatch.undo()

    run(test())


def test_an_endless_line_does_not_stop_the_others() -> None:
    shown: list[str] = []

    async def test() -> None:
        async with Supervisor(lambda name, line: shown.append(line[:20])) as supervisor:
            code = "import sys; sys.stdout.write('y' * (3 << 20) + '\\n'); " + POLITE
            child = await supervisor.start("a", python("import sys; " + code), "ready: ", {})
            await supervisor.wait_ready([child], HANG_S)

    run(test())
    assert shown[-1] == "x ready: now"
    assert "(a line of more than" in shown
