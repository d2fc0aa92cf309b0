"""No test leaves its settings of the process to the next one."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests import kept_process as kept
from tests.kept_process import ProcessSetting, kept_process, let_children_hear_hangups, settings

if TYPE_CHECKING:
    from pathlib import Path


def values() -> list[object]:
    return [one.read() for one in settings()]


def test_the_settings_are_what_they_were(tmp_path: Path) -> None:
    before, folder = values(), os.getcwd()
    with kept_process():
        os.chdir(tmp_path)
        gc.disable()
        gc.set_threshold(7)
        sys.setswitchinterval(0.5)
        socket.setdefaulttimeout(3.0)
        logging.disable(logging.ERROR)
        logging.root.setLevel(logging.DEBUG)
        signal.signal(signal.SIGHUP, lambda *_: None)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_default_dtype(torch.float64)
        assert sum(now != value for now, value in zip(values(), before, strict=True)) == 9
    assert (values(), os.getcwd()) == (before, folder)


def test_what_runs_under_nohup_starts_processes_that_hear_hangups() -> None:
    with kept_process():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        let_children_hear_hangups()
        signal.raise_signal(signal.SIGHUP)
        show = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_DFL)"
        assert subprocess.run([sys.executable, "-c", show], capture_output=True, check=True).stdout == b"True\n"


def test_a_removed_folder_keeps_nothing_from_being_restored(tmp_path: Path) -> None:
    before, folder = values(), os.getcwd()
    (tmp_path / "removed").mkdir()
    with kept_process():
        os.chdir(tmp_path / "removed")
        (tmp_path / "removed").rmdir()
        gc.set_threshold(7)
        with kept_process():  # begins there
            gc.set_threshold(8)
        assert gc.get_threshold()[0] == 7
    assert (values(), os.getcwd()) == (before, folder)


def test_one_that_cannot_be_restored_keeps_no_other_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: object) -> None:
        raise ValueError(value)

    before, folder = gc.get_threshold(), os.getcwd()
    changing = ProcessSetting(iter([1, 2]).__next__, refuse)
    known = settings()
    monkeypatch.setattr(kept, "settings", lambda: [*known, changing, known[0]])

    @kept_process()
    def change() -> None:
        os.chdir(tmp_path)
        gc.set_threshold(7)

    with pytest.raises(ValueError, match="1"):
        change()
    assert (gc.get_threshold(), os.getcwd()) == (before, folder)
