"""Kernels compiled for a Hopper GPU, in a process without the interpreter in which the tests run on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.deadlines import HANG_S
from tests.kernels.forked_module import start_module

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
    compiling = start_module(module, cache, *arguments)
    compiling.wait(COMPILE_S)
    return Compiled(compiling.output.read_text(), compiling.log.read_text())
