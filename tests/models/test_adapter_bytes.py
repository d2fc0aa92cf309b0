"""The files of an adapter: one read, bounded, and an identity that covers each byte."""

from __future__ import annotations

import os
import re
from mmap import mmap
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest

from pd_cluster.adapters import adapter_bytes
from pd_cluster.adapters.adapter_bytes import CONFIG, MAX_CONFIG_BYTES, READ_DEADLINE_S, WEIGHTS, read_adapter
from pd_cluster.errors import BadAdapter
from tests.models.adapter_files import CONFIG as SETTINGS
from tests.models.adapter_files import MAX_BYTES, usual, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def refused(directory: Path, told: str, max_bytes: int = MAX_BYTES) -> None:
    with pytest.raises(BadAdapter, match=re.escape(told)) as raised:
        read_adapter(directory, max_bytes)
    assert raised.value.status == 400


def test_each_byte_changes_the_digest(tmp_path: Path) -> None:
    """Two short trainings of one start may agree in nearly all bytes."""
    directory, num_changes = write(tmp_path, SETTINGS, usual()), 0
    digests = {read_adapter(directory, MAX_BYTES).digest}
    for name in (CONFIG, WEIGHTS):
        original = (directory / name).read_bytes()
        for place in {*range(0, len(original), len(original) // 50), len(original) - 1}:
            changed = bytearray(original)
            changed[place] ^= 1
            (directory / name).write_bytes(changed)
            digests.add(read_adapter(directory, MAX_BYTES).digest)
            num_changes += 1
        (directory / name).write_bytes(original)
    assert len(digests) == 1 + num_changes


def test_the_memory_of_the_files_is_not_written_before_they_are_read(tmp_path: Path) -> None:
    """To fill 84 MB with zeros takes 30 ms, and holds the interpreter's lock: no stream of this process goes on."""
    files = read_adapter(write(tmp_path, SETTINGS, usual()), MAX_BYTES)
    assert isinstance(files.weights.obj, mmap)


def test_equal_files_have_one_digest_wherever_they_are(tmp_path: Path) -> None:
    one, other = (read_adapter(write(tmp_path / name, SETTINGS, usual()), MAX_BYTES) for name in ("one", "other"))
    assert one.digest == other.digest
    assert len(one.digest) == 32
    (tmp_path / "one" / "README.md").write_text("no file of the adapter")
    assert read_adapter(tmp_path / "one", MAX_BYTES).digest == one.digest


def test_bytes_do_not_move_from_one_file_to_the_other(tmp_path: Path) -> None:
    digests = set()
    for number, (config, weights) in enumerate([(b"ab", b"cd"), (b"abc", b"d"), (b"", b"abcd"), (b"abcd", b"")]):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / CONFIG).write_bytes(config)
        (directory / WEIGHTS).write_bytes(weights)
        digests.add(read_adapter(directory, MAX_BYTES).digest)
    assert len(digests) == 4


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (CONFIG, lambda file: file.unlink(), "has no adapter_config.json: is it a directory that peft saved?"),
        (WEIGHTS, lambda file: file.unlink(), "is it a directory that peft saved as safetensors?"),
        (WEIGHTS, lambda file: file.rename(file.with_name("adapter_model.bin")), "is a pickle, which can run any code"),
        (WEIGHTS, lambda file: file.rename(file.with_name(f"{WEIGHTS}.index.json")), "save the adapter as one file"),
        (WEIGHTS, _pipe, "is not a regular file"),
        (WEIGHTS, _folder, "is not a regular file"),
        (
            CONFIG,
            lambda file: file.write_bytes(b" " * (MAX_CONFIG_BYTES + 1)),
            "1048577 bytes, and 1048576 are allowed",
        ),
        (WEIGHTS, lambda file: file.write_bytes(b" " * (MAX_BYTES + 1)), "and 16777216 are allowed"),
        (WEIGHTS, lambda file: file.rename(file.with_name("adapters.safetensors")), "is what mlx-lm saves"),
        (WEIGHTS, lambda file: file.write_text(POINTER), f"{WEIGHTS} is a git-lfs pointer, not the file itself"),
        (CONFIG, lambda file: file.write_text(POINTER), f"{CONFIG} is a git-lfs pointer, not the file itself"),
    ],
)
def test_what_is_no_adapter_is_named(tmp_path: Path, name: str, change: Callable[[Path], object], told: str) -> None:
    directory = write(tmp_path, SETTINGS, usual())
    change(directory / name)
    refused(directory, told)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "none", "none has no adapter_config.json")


def _grow(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(b"x")


def _cut(file: Path) -> None:
    os.truncate(file, 5)


def _replace(file: Path) -> None:
    """By a file of other bytes, with the size and the times of the first one."""
    content, found = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    other = file.with_name("other")
    other.write_bytes(content)
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(file)


def _rewrite(file: Path) -> None:
    """In place, to the same size, at another time."""
    found = file.stat()
    file.write_bytes(b"y" * found.st_size)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns + 1))


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("change", [_grow, _cut, _replace, _rewrite, lambda file: file.unlink()])
def test_files_that_change_while_they_are_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Path], object]
) -> None:
    """The change comes when both are open, before the first byte is read."""
    directory, read = write(tmp_path, SETTINGS, usual()), adapter_bytes._read
    waiting = [lambda: change(directory / name)]

    def read_changed(*args: object) -> memoryview:
        while waiting:
            waiting.pop()()
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(adapter_bytes, "_read", read_changed)
    with pytest.raises(BadAdapter, match=r"changed while it was read|No such file"):
        read_adapter(directory, MAX_BYTES)


def test_a_slow_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, times = write(tmp_path, SETTINGS, usual()), iter([0.0, 1.0, READ_DEADLINE_S + 0.5])
    monkeypatch.setattr(adapter_bytes, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with pytest.raises(BadAdapter, match="the disk is too slow"):
        read_adapter(directory, MAX_BYTES)


@pytest.mark.parametrize("fails", [True, False])
def test_files_are_closed(tmp_path: Path, fails: bool) -> None:
    directory = write(tmp_path, SETTINGS, usual())
    if fails:
        refused(directory, "are allowed", 10)
    else:
        read_adapter(directory, MAX_BYTES)
    assert not [one.path for one in psutil.Process().open_files() if one.path.startswith(str(directory))]


@pytest.mark.parametrize("part", ["", "adapter_model.safetensors", "adapter_config.json"])
def test_a_link_that_leads_out_is_refused_when_it_is_opened(tmp_path: Path, part: str) -> None:
    """Another file may be there since the path was looked at."""
    outside = write(tmp_path / "outside", SETTINGS, usual())
    root = tmp_path / "root"
    inside = write(root / "inside", SETTINGS, usual())
    read_adapter(inside, MAX_BYTES, below=root)
    if part:
        (inside / part).unlink()
        (inside / part).symlink_to(outside / part)
    else:
        inside.rename(root / "moved")
        inside.symlink_to(outside)
    with pytest.raises(BadAdapter, match="leads out of --lora-dir"):
        read_adapter(inside, MAX_BYTES, below=root)
    assert read_adapter(inside, MAX_BYTES).digest == read_adapter(outside, MAX_BYTES).digest


@pytest.mark.parametrize("part", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_link_that_leads_out_tells_nothing_of_its_end(tmp_path: Path, part: str) -> None:
    inside = write(tmp_path / "root" / "inside", SETTINGS, usual())
    (tmp_path / "file").write_bytes(b"")
    told = set()
    for end in ("file", "missing", "file/below"):
        (inside / part).unlink()
        (inside / part).symlink_to(tmp_path / end)
        with pytest.raises(BadAdapter) as caught:
            read_adapter(inside, MAX_BYTES, below=tmp_path / "root")
        told.add(str(caught.value))
    assert told == {f"{part} leads out of --lora-dir: only what is below it can be loaded"}
