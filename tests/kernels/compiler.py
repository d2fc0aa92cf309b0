"""Kernels compiled for a Hopper GPU, in a process without the interpreter in which the tests run on a CPU.

It is forked off one that has imported torch: a process of its own would take 2 s of CPU for that, and there are eight.
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.connectors.forked import start_process
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from pathlib import Path

COMPILE_S = 4 * HANG_S  # some compile four kernels, and a busy machine has little time for them


@dataclass(frozen=True)
class Compiled:
    """What the process has written."""

    output: str
    log: str


def compile_by(module: str, cache: Path, *arguments: str) -> Compiled:
    """What a module that compiles kernels writes when it is run. `cache` has no file of another run."""
    output, log = cache / "output.txt", cache / "log.txt"
    process = start_process(_run, module, cache, arguments, output, log)
    process.join(COMPILE_S)
    assert process.exitcode == 0, f"{process.exitcode}: {log.read_text()}"
    return Compiled(output.read_text(), log.read_text())


def _run(module: str, cache: Path, arguments: tuple[str, ...], output: Path, log: Path) -> None:
    assert "triton" not in sys.modules, "it reads at its import whether it interprets"
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    for path, number in ((output, 1), (log, 2)):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (as long as the process)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
