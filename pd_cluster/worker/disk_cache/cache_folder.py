"""A rank's directory of block files: its lock, its index by use, its bound.

    file   magic (16)   digest (16)   zeros to 4096   the block's bytes as in the cache   zeros to a page's end

A file has its name only when it is whole: it is written as a draft and renamed. Nothing is synced: a file that a crash
of the machine left in part fails its digest. The index is the names and sizes that lie there, so a restart finds them.
Names of other models, keys and layouts are never asked for: they count for the bound, and leave as the oldest do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

PAGE_BYTES = 4096  # what O_DIRECT wants of addresses and lengths; the size of a file's header
MAX_FILES = 262_144  # 2 TB of an 8B model's blocks of 64 tokens; 60 MB of index
_NAME = re.compile(r"pd-[0-9a-f]{32}-\d+-\d+-[0-9a-f]{32}")
_DRAFT = "draft-"
_PROBE = f"{_DRAFT}probe"
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
# what has a file's name is no file of ours, and the disk works
_NO_FILE = {errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.EISDIR, errno.EACCES, errno.EPERM}
_WRONG_PATH = _NO_FILE | {errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}  # at the start; all else is the disk's fault


def aligned(num_bytes: int) -> int:
    """The next multiple of a page."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class CacheFolder:
    """Threads share it. All but `in` and the counts may wait for the disk, and raise OSError when it is full or fails.

    failure: of the disk at the start; None: there was none. After one only `in`, the counts and `close` may be used.
    Raises StartupError: another process has the directory, it is another user's, or the path is wrong.
    """

    def __init__(self, path: Path, max_bytes: int, max_files: int = MAX_FILES) -> None:
        self.path = path
        self._max_bytes, self._max_files = max_bytes, max_files
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # the file that was used last is the last
        self._num_drafts = 0
        self.num_bytes = 0  # with drafts
        self.num_evicted = 0
        self._direct, self._folder = 0, -1
        self.failure: OSError | None = None
        try:
            self._folder = _open_locked(path)
            self._sweep()
            self._probe_direct()
        except OSError as error:
            if error.errno in _WRONG_PATH:
                raise StartupError(f"the disk cache cannot use {path}: {error}") from error
            self.failure = error

    def close(self) -> None:
        """Give up the lock. No call may be under way."""
        if self._folder >= 0:
            os.close(self._folder)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def read(self, name: str, content: memoryview) -> bool:
        """Read a file of exactly this size into pages. False: there is none; what has its name is deleted."""
        try:
            file = self._open(name, os.O_RDONLY)
            try:
                is_whole = os.readv(file, [content]) == os.fstat(file).st_size == len(content)
                os.utime(file)  # so that the next start knows the order
            finally:
                os.close(file)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            is_whole = False
        if not is_whole:
            self.discard(name)
            return False
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        return True

    def write(self, name: str, content: memoryview) -> bool:
        """Write pages as a new file, after old ones were deleted for it. False: the bound has no room for it.

        No other thread writes this name.
        """
        with self._lock:
            if not self._make_room(len(content)):
                return False
            self.num_bytes += len(content)
            self._num_drafts += 1
        draft = f"{_DRAFT}{threading.get_ident()}"
        try:
            file = self._create(draft)
            try:
                if os.write(file, content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
            os.rename(draft, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            with suppress(OSError):
                os.unlink(draft, dir_fd=self._folder)
            raise
        with self._lock:
            self._num_drafts -= 1
            self._sizes[name] = len(content)
        return True

    def discard(self, name: str) -> None:
        """Delete a file. Idempotent."""
        with self._lock:
            self._remove(name)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | _FLAGS | self._direct, 0o600, dir_fd=self._folder)

    def _create(self, name: str) -> int:
        """A new file, which no other process has open: what has its name is deleted."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)
        return self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def _probe_direct(self) -> None:
        """Set O_DIRECT, or 0 where the file system has it not. Raises OSError where no file can be written."""
        for self._direct in (os.O_DIRECT, 0):
            try:
                os.close(self._create(_PROBE))
                break
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
        os.unlink(_PROBE, dir_fd=self._folder)

    def _make_room(self, num_bytes: int) -> bool:
        while self.num_bytes + num_bytes > self._max_bytes or len(self._sizes) + self._num_drafts >= self._max_files:
            if not self._sizes:
                return False
            self._remove(next(iter(self._sizes)))
            self.num_evicted += 1
        return True

    def _remove(self, name: str) -> None:
        size = self._sizes.pop(name, None)
        if size is None:
            return
        try:
            os.unlink(name, dir_fd=self._folder)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
        self.num_bytes -= size

    def _sweep(self) -> None:
        """Index what lies there, oldest first. Delete drafts of an earlier process, and what is above the bound."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(_DRAFT):
                    os.unlink(entry.name, dir_fd=self._folder)
                elif _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    facts = entry.stat(follow_symlinks=False)
                    found.append((facts.st_mtime_ns, entry.name, facts.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.num_bytes += size
        self._make_room(0)


def _open_locked(path: Path) -> int:
    """The directory, made with mode 0700, locked for this process. The kernel ends the lock with the process."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    try:
        if (owner := os.fstat(folder).st_uid) != os.geteuid():  # root may use it, and its owner reads what root writes
            raise StartupError(f"the disk cache {path} belongs to another user ({owner})")
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(folder, 0o700)
    except BlockingIOError as error:
        os.close(folder)
        raise StartupError(f"another node has the disk cache {path}: give each node a directory of its own") from error
    except BaseException:
        os.close(folder)
        raise
    return folder
