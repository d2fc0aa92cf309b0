"""Writes every call of a traced tree's functions to a file. Python imports a module of this name when it starts.

Only `benchmarks.files_to_open` puts this directory on the path, and sets

    PD_TRACE_TREE   the directory with the sources
    PD_TRACE_OUT    the directory for one file per process

A file has one line for the process (its parent's id and its command line), then one for each call: CLOCK_MONOTONIC in
ns, path of the source file relative to the tree, function. Calls of all threads are seen, but not module bodies.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


def _trace(tree: Path, out: Path) -> None:
    file = os.open(out / f"{os.getpid()}.calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    command = Path("/proc/self/cmdline").read_text(encoding="utf-8").replace("\0", " ")
    os.write(file, f"{os.getppid()} {command}\n".encode())
    prefix = f"{tree}{os.sep}"
    paths: dict[str, str] = {}  # "": not of the tree

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        path = paths.get(code.co_filename)
        if path is None:
            path = code.co_filename.removeprefix(prefix) if code.co_filename.startswith(prefix) else ""
            if path.startswith("."):  # a virtual environment in the tree
                path = ""
            paths[code.co_filename] = path
        if path and code.co_name != "<module>":
            os.write(file, f"{time.monotonic_ns()} {path} {code.co_qualname}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


if "PD_TRACE_OUT" in os.environ:
    _trace(Path(os.environ["PD_TRACE_TREE"]), Path(os.environ["PD_TRACE_OUT"]))
