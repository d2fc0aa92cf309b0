"""Processes for tests that need torch or LMCache: forked off one that has imported them, so that they start at once.

That process has no threads, sockets or device of its own. A start costs 0.4 s of CPU; by `spawn` it was 4.1 s, nearly
all of it imports, and the suite starts some fifty.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.connectors.forked_imports"])


def start_process(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Call `target` in a new process with the environment of this one, and kill it when this one ends."""
    process = _processes.Process(target=_run, args=(dict(os.environ), target, arguments), daemon=True)
    process.start()
    return process


def _run(environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)
