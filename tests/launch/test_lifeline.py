"""A launcher that is killed leaves no process behind."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

from pd_cluster.launch.lifeline import LIFELINE_ENV, hold_lifeline
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from tests.cluster import Launcher

CHILD = """
import signal, sys, threading
from pd_cluster.launch import lifeline
lifeline.ORPHAN_GRACE_S = 0.1 if "{mode}" == "stubborn" else 600.0
orphaned = lifeline.hold_lifeline()
if "{mode}" == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdout.write("child waits\\n"); sys.stdout.flush()
threading.Event().wait()
"""
PARENT = """
import os, subprocess, sys, threading
from pd_cluster.launch.lifeline import Lifeline
lifeline = Lifeline()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], pass_fds=(lifeline.read_fd,),
                         env={**os.environ, **lifeline.environment()})
sys.stdout.write(f"child {child.pid}\\n"); sys.stdout.flush()
threading.Event().wait()
"""


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["polite", "stubborn"])
def test_children_of_a_killed_launcher_end(mode: str, launcher: Launcher) -> None:
    parent = launcher.start("parent", [sys.executable, "-c", PARENT, CHILD.replace("{mode}", mode)])
    child = psutil.Process(int(parent.wait_line("child ").split()[1]))
    parent.wait_line("child waits")
    parent.send(signal.SIGKILL)
    assert parent.wait() == -signal.SIGKILL
    child.wait(timeout=HANG_S)
    assert not child.is_running()


def test_without_a_launcher_nothing_happens() -> None:
    before = set(threading.enumerate())
    assert not hold_lifeline({}).is_set()
    assert not hold_lifeline({LIFELINE_ENV: ""}).is_set()
    assert set(threading.enumerate()) <= before
