"""What a process is to itself and to others, as a line of JSON: the same for a forked and an executed one."""

from __future__ import annotations

import atexit
import json
import os
import random
import resource
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def shown() -> dict[str, Any]:
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "main": [sys.modules["__main__"].__name__, str(sys.modules["__main__"].__spec__.name)],
        "cmdline": psutil.Process().cmdline(),
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0),
        "umask": os.umask(0o022),
        "threads": len(os.listdir("/proc/self/task")),
        "files": {fd: stat.filemode(os.stat(int(fd)).st_mode)[0] for fd in opened()},
        "inheritable": [fd for fd in opened() if os.get_inheritable(int(fd))],
        "streams": [
            [one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.write_through, one.seekable()]
            for one in streams
        ],
        "signals": {one.name: str(signal.getsignal(one)) for one in signal.valid_signals() if hasattr(one, "name")},
        "blocked": [*map(str, signal.pthread_sigmask(signal.SIG_BLOCK, ()))],
        "files limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        "nice": os.nice(0),
        "switch interval": sys.getswitchinterval(),
    }


def opened() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{fd}").exists()]


def drawn() -> list[float]:
    """Random numbers of all generators that have been imported."""
    numbers = [random.random()]
    if "torch" in sys.modules:
        import numpy as np
        import torch

        numbers += [float(np.random.random()), float(torch.rand(()))]
    return numbers


if __name__ == "__main__":
    atexit.register(sys.stdout.write, "the end\n")
    what = sys.argv[1]
    if what == "fail":
        raise RuntimeError("as it was told")
    if what == "sleep":
        sys.stdout.write("asleep\n")
        time.sleep(600)
    sys.stdout.write(json.dumps(drawn() if what == "draw" else shown()) + "\n")
    sys.exit(int(sys.argv[2]))
