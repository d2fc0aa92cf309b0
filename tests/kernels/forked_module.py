"""Modules that use Triton, run as by `python -m` in processes of their own.

Triton reads at its import whether it interprets, so that one process cannot do both. The processes are forked off one
that has imported torch, but not Triton: a process that is executed takes 2 s of CPU to import torch.
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.connectors.forked import start_process

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess
    from pathlib import Path


@dataclass(frozen=True)
class ForkedModule:
    """A module that runs, and the files that it writes to."""

    process: BaseProcess
    output: Path
    log: Path

    def wait(self, deadline_s: float) -> None:
        """Until it has ended. Asserts that it succeeded."""
        self.process.join(deadline_s)
        assert self.process.exitcode == 0, f"{self.process.exitcode}: {self.log.read_text()}"


def start_module(module: str, folder: Path, *arguments: str, interprets: bool = False) -> ForkedModule:
    """Run a module with these arguments. `folder` is for what it writes and what Triton keeps: of this run alone."""
    folder.mkdir(exist_ok=True)
    output, log = folder / "output.txt", folder / "log.txt"
    return ForkedModule(start_process(_run, module, folder, arguments, output, log, interprets), output, log)


def _run(module: str, folder: Path, arguments: tuple[str, ...], output: Path, log: Path, interprets: bool) -> None:
    assert "triton" not in sys.modules, "it reads at its import whether it interprets"
    os.environ.pop("TRITON_INTERPRET", None)
    if interprets:
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TRITON_CACHE_DIR"] = str(folder)
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
