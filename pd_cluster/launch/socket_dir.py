"""The directory of a node's sockets to its engine. It goes with the node, however the node goes."""

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
    """A new directory for the length of the block, of mode 0700: whoever reaches the sockets can read every prompt.

    It is locked while its node lives; those that killed nodes have left in `parent` (default: the system's temporary
    directory) are removed first. A lock, not a process id: containers that share a /tmp do not share ids.
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
        fcntl.flock(lock, fcntl.LOCK_EX)  # held by another node only while that one removes it as stale
        if path.exists():
            return path, lock
        os.close(lock)


def _remove_if_stale(path: Path) -> None:
    """Remove a directory of this user's that nobody has locked and that holds nothing but sockets."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile, or another user's
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
