"""What Mooncake expects of the system is there, whether the system has it or not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cluster import READY_DEADLINE_S, SOURCES

pytest.importorskip("nixl_cu13")

_LOAD = """
import ctypes, os, sys
from pd_connectors.bundled import NEEDED, BundledLibraries
for _ in range(2):  # the second finds the first one's and does nothing
    with BundledLibraries() as libraries:
        libraries.load()
for name in NEEDED:
    ctypes.CDLL(name)
with BundledLibraries() as libraries:
    environment, fds = libraries.environment(), list(libraries.fds)
    for fd in fds:
        os.set_inheritable(fd, True)
    code = "import ctypes; [ctypes.CDLL(name) for name in %r]" % (NEEDED,)
    assert os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", code], {**os.environ, **environment}) == 0
assert not libraries.fds
"""


@pytest.mark.long
def test_a_process_and_its_children_find_the_libraries_under_their_own_names() -> None:
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    run = subprocess.run(
        [sys.executable, "-c", _LOAD], env=environment, capture_output=True, text=True, timeout=READY_DEADLINE_S
    )
    assert run.returncode == 0, run.stderr
