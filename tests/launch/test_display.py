"""A reader that goes away changes what is shown, not how the cluster lives and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys

import pytest

from pd_cluster.launch.supervise import Supervisor
from pd_cluster.launch.up import stop_signals
from tests.deadlines import HANG_S

# writes a line, waits until its reader has gone, then goes on as `up` does
TALKER = """
import sys
from pd_cluster.launch.display import Display
with Display() as display:
    display.say("first")
    sys.stdin.readline()
    for _ in range(3):
        display.line("prefill-0", "x" * 100)
        display.status("stopping")
        display.say("more")
sys.stderr.write("ended well")
"""
# more output than a pipe holds, then an end in good order when told
CHATTY = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
sys.stdout.write("ready\\n")
sys.stdout.flush()
for _ in range(4096):
    sys.stdout.write("x" * 99 + "\\n")
sys.stdout.write("all said\\n")
sys.stdout.flush()
signal.pause()
"""


def _talk(stdout: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", TALKER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE)


def _check_end(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(b"go on\n", timeout=HANG_S)
    assert (process.returncode, errors.decode()) == (0, "ended well")


@pytest.mark.long
def test_a_closed_pipe_makes_the_display_silent() -> None:
    reader, writer = os.pipe()
    process = _talk(writer)
    os.close(writer)
    assert os.read(reader, 100) == b"first\n"
    os.close(reader)
    _check_end(process)


@pytest.mark.long
def test_a_closed_terminal_makes_the_display_silent() -> None:
    terminal, child_side = os.openpty()
    process = _talk(child_side)
    os.close(child_side)
    assert b"first" in os.read(terminal, 100)
    os.close(terminal)
    _check_end(process)


def test_what_cannot_be_shown_holds_up_no_child(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []

    def show(_: str, line: str) -> None:
        shown.append(line)
        raise RuntimeError("no reader")

    async def run() -> tuple[list[str], int | None]:
        async with Supervisor(show) as supervisor:
            child = await supervisor.start("chatty", [sys.executable, "-c", CHATTY], "all said", {})
            await supervisor.wait_ready([child], HANG_S)
            killed = await supervisor.stop([child], HANG_S)
            return [one.name for one in killed], child.process.returncode

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(run()) == ([], 0)
    assert shown == ["ready"]
    assert caplog.text.count("can no longer be shown") == 1


def test_hangup_ends_the_cluster_unless_it_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)
