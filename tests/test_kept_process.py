"""No test leaves its settings of the process to the next one."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import torch

from tests.kept_process import kept_process, settings

if TYPE_CHECKING:
    from pathlib import Path


def test_the_settings_are_what_they_were(tmp_path: Path) -> None:
    before = [value for value, _ in settings()]
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
        assert sum(now != value for (now, _), value in zip(settings(), before, strict=True)) == 10
    assert [value for value, _ in settings()] == before
