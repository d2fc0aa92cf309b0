"""What code under test sets for its own process, beside the environment, ends with the test."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def let_children_hear_hangups() -> None:
    """Under nohup SIGHUP is ignored, and then by all that this process starts: a router could not be hung up.

    A handler that does nothing keeps this process alive just as well, and no child inherits it.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


class ProcessSetting(NamedTuple):
    """A value that a later test could see."""

    read: Callable[[], Any]
    restore: Callable[[Any], object]


def settings() -> list[ProcessSetting]:
    """All but the working directory, which may have been removed and then has no name."""
    return _settings(sys.modules.get("torch"))


@cache
def _settings(torch: ModuleType | None) -> list[ProcessSetting]:
    found = [
        ProcessSetting(gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()),
        ProcessSetting(gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds)),
        ProcessSetting(sys.getswitchinterval, sys.setswitchinterval),
        ProcessSetting(socket.getdefaulttimeout, socket.setdefaulttimeout),
        ProcessSetting(lambda: logging.root.manager.disable, logging.disable),
        ProcessSetting(lambda: logging.root.level, logging.root.setLevel),
    ]
    found += [ProcessSetting(partial(signal.getsignal, one), partial(signal.signal, one)) for one in SIGNALS]
    if torch:
        found += [
            ProcessSetting(torch.get_num_threads, torch.set_num_threads),
            ProcessSetting(torch.get_default_dtype, torch.set_default_dtype),
        ]
    return found


@contextmanager
def kept_process() -> Iterator[None]:
    """At the end these settings and the working directory are what they were at the beginning.

    One that cannot be restored raises after all others were.
    """
    with ExitStack() as kept:
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        kept.callback(os.close, folder)
        kept.callback(os.fchdir, folder)
        before = [(setting, setting.read()) for setting in settings()]
        try:
            yield
        finally:
            for setting, value in before:
                if setting.read() != value:
                    kept.callback(setting.restore, value)
