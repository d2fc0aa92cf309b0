"""No orphans: a child holds the reading end of a pipe whose writing end only its launcher has.

However the launcher dies, the kernel closes that end. Unlike PR_SET_PDEATHSIG this follows the launcher's process and
not the thread that spawned, has no race with a parent that is gone already, and works outside Linux.
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
ORPHAN_GRACE_S = 5.0  # an orphan that has not left by itself after this is ended from within


class Lifeline:
    """The launcher's side. Children end when this object's process ends, or at `close`."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        self._open = True

    def environment(self) -> dict[str, str]:
        """What a child needs in its environment; start it with `pass_fds=(lifeline.read_fd,)`."""
        return {LIFELINE_ENV: str(self.read_fd)}

    def close(self) -> None:
        """Idempotent."""
        if self._open:
            self._open = False
            os.close(self._write_fd)
            os.close(self.read_fd)


def hold_lifeline(environ: Mapping[str, str] = os.environ) -> threading.Event:
    """Called once in a child: when its launcher is gone it sends itself SIGTERM, and leaves by force if that hangs.

    The event is set as soon as the launcher is gone, before the signal. Without a launcher nothing happens.
    """
    orphaned = threading.Event()
    fd = environ.get(LIFELINE_ENV, "")
    if fd.isdigit():
        os.set_inheritable(int(fd), False)  # a grandchild has its own line to its own parent
        threading.Thread(target=_wait_for_end, args=(int(fd), orphaned), name="lifeline", daemon=True).start()
    return orphaned


def _wait_for_end(fd: int, orphaned: threading.Event) -> None:
    while os.read(fd, 1):
        pass
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(ORPHAN_GRACE_S)
    os._exit(ORPHAN_EXIT_CODE)
