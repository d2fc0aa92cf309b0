"""Workers of pytest-xdist are forked from one process that has imported and collected all tests: once, not once each.

    pytest -n 3                 worker_stand_in.py            forked_worker.py
      starts this ─────────────────────────────────────────► collects as a worker does, then forks
      xdist starts these ─────► hands its streams over ─────► a child for each: the worker
      xdist's messages ◄───────────────────────────────────► xdist's own code, which finds all tests collected

Nothing else is different in a worker, but for this:

- Hashes of strings have the same seed in all workers of a run.
- What a test file makes when it is imported was made once, before the fork. A fork loses threads and shares files: if
  collecting has left one, this is said, and the workers are processes of their own.
- Its parent is the process that collected, and it has one more thread, which waits.

Workers are processes of their own too when that process ends before it has collected, for example by -x and an error in
a test file: they tell it as ever. `-p no:tests.forked_workers` lets all be processes of their own.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fork_server import SharedForks

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
STAND_IN = Path(__file__).with_name("worker_stand_in.py")
DEATH_S = 60.0  # from the end of the workers to the end of the process that they were forked from


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Let xdist start stand-ins, which become workers. A worker that replaces one that died has the same `python`."""
    from xdist.plugin import _sys_path

    ours = [spec for spec in specs if spec.popen and not (spec.python or spec.via or spec.chdir)]
    if not ours:
        return
    folder = tempfile.TemporaryDirectory(prefix="workers-")
    config.add_cleanup(folder.cleanup)
    path, variables = f"{folder.name}/door", dict[str, str]()
    if config.rootpath == ROOT:
        from tests.cluster import base_environment  # not for runs of other tests

        forks = SharedForks(Path(folder.name), base_environment(), ROOT)
        config.add_cleanup(forks.close)
        variables = forks.variables
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen(len(ours))
        arguments = [str(one) for one in config.invocation_params.args]
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.forked_worker import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(door.fileno()), json.dumps([arguments, _sys_path])],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(door.fileno(),),
            env={**os.environ, **variables},
        )  # fmt: skip
    config.add_cleanup(lambda: _end(process))
    for spec in ours:
        spec.python = shlex.join([sys.executable, "-I", "-S", str(STAND_IN), path])


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends by itself when this process is gone."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait(DEATH_S)
