"""Ends a child when its launcher dies. The child reads from a pipe; only the launcher has the end that writes.

The kernel closes that end however the launcher dies. Unlike PR_SET_PDEATHSIG, this follows the process and not the
thread that started the child, has no race with a parent that died earlier, and works outside Linux.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LIFELINE_ENV = "PD_LIFELINE_FD"
ORPHAN_EXIT_CODE = 3
ORPHAN_GRACE_S = 5.0  # an orphan that still runs after this exits by force


class Lifeline:
    """The launcher's end of the pipe. Children end when this process ends, or at `close`."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        self._open = True

    def environment(self) -> dict[str, str]:
        """Variables for a child's environment; start the child with `pass_fds=(lifeline.read_fd,)`."""
        return {LIFELINE_ENV: str(self.read_fd)}

    def close(self) -> None:
        """Idempotent."""
        if self._open:
            self._open = False
            os.close(self._write_fd)
            os.close(self.read_fd)


def hold_lifeline(environ: Mapping[str, str] = os.environ) -> threading.Event:
    """Make this process end when its launcher dies. Call it once in a child of the launcher.

    After the launcher's death this process sends itself SIGTERM, and exits by force if it hangs. The returned event is
    set before the signal. A process without a launcher is left alone.
    """
    orphaned = threading.Event()
    fd = environ.get(LIFELINE_ENV, "")
    if fd.isdigit():
        os.set_inheritable(int(fd), False)  # a grandchild has a pipe of its own to its own parent
        threading.Thread(target=_wait_for_end, args=(int(fd), orphaned), name="lifeline", daemon=True).start()
    return orphaned


def _wait_for_end(fd: int, orphaned: threading.Event) -> None:
    while os.read(fd, 1):
        pass
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(ORPHAN_GRACE_S)
    os._exit(ORPHAN_EXIT_CODE)
