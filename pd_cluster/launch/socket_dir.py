"""The directory of the sockets between a node and its engine. It is removed even after the node was killed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("pd_cluster.node")

PREFIX = "pd-cluster-node-"


@contextlib.contextmanager
def socket_directory(parent: Path | None = None) -> Iterator[Path]:
    """A new directory of mode 0700 during the block. A process that can open the sockets can read every prompt.

    The directory is locked while its node lives. Directories that killed nodes left in `parent` (default: the system's
    temporary directory) are removed first. Locks, not process ids: containers that share /tmp do not share ids.
    """
    root = Path(tempfile.gettempdir()) if parent is None else parent
    for left_behind in root.glob(f"{PREFIX}*"):
        _remove_if_stale(left_behind)
    path, lock = _make_locked(root)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _make_locked(root: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)  # another node holds it only while it removes the directory as stale
        if path.exists():
            return path, lock
        os.close(lock)


def _remove_if_stale(path: Path) -> None:
    """Remove a directory of this user if it is not locked and contains only sockets."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # removed meanwhile, or of another user
        return
    try:
        if os.fstat(fd).st_uid != os.getuid():
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        entries = list(path.iterdir())
        if all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in entries):
            for entry in entries:
                entry.unlink()
            path.rmdir()
    except BlockingIOError:
        return  # its node lives
    except OSError as error:
        logger.warning("the sockets of a dead node in %s cannot be removed: %s", path, error)
    finally:
        os.close(fd)
