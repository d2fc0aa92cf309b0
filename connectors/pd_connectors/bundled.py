"""System libraries that a wheel of ours brings, for another one that expects the system to have them.

Mooncake's binaries name `libibverbs.so.1` and `libnuma.so.1`, which many images lack. NIXL's wheel has both, renamed
(`libibverbs-1de1263b.so...`) as bundled libraries are, so that the loader takes them for something else: a copy in
memory gets the old name back. What the system has is left alone.
"""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("libnuma.so.1", "libibverbs.so.1")


class BundledLibraries:
    """Libraries of NEEDED that the system lacks and NIXL's wheel has. A context manager; open until `close`."""

    def __init__(self) -> None:
        self._folder = _bundle()
        self._found = [file for name in NEEDED if not _system_has(name) for file in self._files(name)]
        self.fds: list[int] = []  # of the renamed copies
        try:
            for file in self._found:
                self.fds.append(_renamed(file))
        except BaseException:
            self.close()
            raise

    def load(self) -> None:
        """Load them into this process, for libraries that are loaded later. Raises OSError."""
        for file, fd in zip(self._found, self.fds, strict=True):
            if _is_mapped(file):
                continue
            ctypes.CDLL(str(file))  # for what it needs itself, which it finds beside it and the copy would not
            ctypes.CDLL(_path(fd))

    def environment(self) -> dict[str, str]:
        """The environment of a program that needs them. Start the program with `pass_fds=fds`."""
        if not self.fds:
            return {}
        preload = [*map(_path, self.fds), os.environ.get("LD_PRELOAD", "")]
        search = [str(self._folder), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            "LD_PRELOAD": ":".join(part for part in preload if part),
            "LD_LIBRARY_PATH": ":".join(part for part in search if part),
        }

    def close(self) -> None:
        """Close the copies. Idempotent. Loaded libraries stay loaded."""
        while self.fds:
            os.close(self.fds.pop())

    def __enter__(self) -> BundledLibraries:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _files(self, name: str) -> list[Path]:
        return [] if self._folder is None else sorted(self._folder.glob(f"{name.partition('.')[0]}-*"))[:1]


def _bundle() -> Path | None:
    spec = find_spec("nixl_cu13")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parents[1] / "nixl_cu13.libs"
    return folder if folder is not None and folder.is_dir() else None


def _system_has(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return not _is_mapped(Path(name.partition(".")[0] + "-"))  # else a copy answers to the name


def _is_mapped(file: Path) -> bool:
    """Whether this process has loaded a copy of ours: of this file, or of one with a name that begins so."""
    return f"/memfd:{file.name}" in Path("/proc/self/maps").read_text(encoding="utf-8")


def _renamed(file: Path) -> int:
    """A copy in memory under the name that a binary asks for; the shorter name fits the longer one's place."""
    old = file.name.encode() + b"\0"
    stem = file.name.partition("-")[0]
    new = next(name for name in NEEDED if name.startswith(f"{stem}.")).encode() + b"\0"
    fd = os.memfd_create(file.name)
    try:
        with os.fdopen(os.dup(fd), "wb") as copy:
            copy.write(file.read_bytes().replace(old, new.ljust(len(old), b"\0")))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"
