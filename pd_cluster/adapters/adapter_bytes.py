"""The files of an adapter, read once: what its digest names is what is served.

A second look at a path may find other content. So the header, the weights and the digest all come from one read.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster.errors import BadAdapter
from pd_cluster.large_pages import large_pages
from pd_cluster.models.checkpoint_files import LFS_HEAD

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
READ_DEADLINE_S = 120.0  # for both files: a disk that gives 84 MB in this time gives less than 1 MB a second
DIGEST_CHARS = 32  # 128 bits
_PIECE_BYTES = 4 << 20  # between two looks at the clock: 4 ms of hashing
_OTHERS = {  # files in place of the weights -> why they are not read
    "adapter_model.bin": "a pickle, which can run any code: load the adapter with peft, and save_pretrained it again",
    "adapter_model.safetensors.index.json": "an index of several files: save the adapter as one file",
    "adapters.safetensors": "what mlx-lm saves: convert the adapter to peft's form",
}


@dataclass(frozen=True, slots=True)
class AdapterBytes:
    """The content of an adapter's files."""

    directory: Path  # for messages; it is not read again
    config: memoryview
    weights: memoryview
    digest: str  # of all bytes, hexadecimal: the adapter's identity


@dataclass(frozen=True, slots=True)
class _OpenFile:
    path: Path
    descriptor: int
    found: os.stat_result

    def changed(self) -> BadAdapter:
        return BadAdapter(f"{self.path} changed while it was read: load it when it is complete")

    def check(self) -> None:
        """Raises BadAdapter if the file was written, or its path leads to another one, since it was opened."""
        if any(_version(now) != _version(self.found) for now in (os.fstat(self.descriptor), self.path.stat())):
            raise self.changed()


def read_adapter(directory: Path, max_bytes: int, below: Path | None = None) -> AdapterBytes:
    """Read the adapter in `directory`, with weights of up to `max_bytes`. `below`: where the files must be, by links.

    Takes seconds from a slow disk: call it on a thread. Raises BadAdapter.
    """
    end_s, digest = time.monotonic() + READ_DEADLINE_S, sha256(b"pd-adapter ")  # with SHA-NI thrice as fast as blake2b
    try:
        with ExitStack() as stack:
            bounds = {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: max_bytes}
            files = [_open(directory / name, most, stack, below) for name, most in bounds.items()]
            config, weights = [_read(file, digest, end_s) for file in files]
            for file in files:
                file.check()
    except (OSError, ValueError) as error:  # the latter: a NUL in the path
        raise BadAdapter(f"cannot read the adapter {directory}: {error}") from error
    for name, content in ((CONFIG, config), (WEIGHTS, weights)):
        if content[: len(LFS_HEAD)] == LFS_HEAD:
            raise BadAdapter(f"{directory / name} is a git-lfs pointer, not the file itself: run `git lfs pull` there")
    return AdapterBytes(directory, config, weights, digest.hexdigest()[:DIGEST_CHARS])


def _open(path: Path, most: int, stack: ExitStack, below: Path | None) -> _OpenFile:
    leaves = BadAdapter(f"{path.name} leads out of --lora-dir: only what is below it can be loaded")
    if below is not None and not Path(os.path.realpath(path)).is_relative_to(below):  # whatever is there, or is not
        raise leaves
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # of a pipe: do not wait for a writer
    except FileNotFoundError:
        for other, why in _OTHERS.items() if path.name == WEIGHTS else ():
            if path.with_name(other).exists():
                raise BadAdapter(f"{path.with_name(other)} is {why}") from None
        form = " as safetensors" if path.name == WEIGHTS else ""  # of a hub's repository others were not downloaded
        raise BadAdapter(f"{path.parent} has no {path.name}: is it a directory that peft saved{form}?") from None
    stack.callback(os.close, descriptor)
    # Of what is open: links on the way may have changed since the path was looked at
    if below is not None and not Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(below):
        raise leaves
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise BadAdapter(f"{path} is not a regular file")
    if found.st_size > most:
        raise BadAdapter(f"{path} has {found.st_size} bytes, and {most} are allowed")
    return _OpenFile(path, descriptor, found)


def _read(file: _OpenFile, digest: Hash, end_s: float) -> memoryview:
    """Raises OSError, and BadAdapter if the file has another length now, or the time is over."""
    digest.update(f"{file.path.name} {file.found.st_size} ".encode())
    # A bytearray is filled with zeros under the interpreter's lock: 30 ms for 84 MB, in which all streams stand
    content, start = memoryview(large_pages(max(1, file.found.st_size)))[: file.found.st_size], 0
    while start < len(content):
        if time.monotonic() >= end_s:
            raise BadAdapter(f"{file.path}: {start} of {len(content)} bytes were read in time: the disk is too slow")
        num_bytes = os.readv(file.descriptor, [content[start : start + _PIECE_BYTES]])
        if not num_bytes:
            break
        digest.update(content[start : start + num_bytes])
        start += num_bytes
    if start < len(content) or os.read(file.descriptor, 1):
        raise file.changed()
    return content


def _version(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
