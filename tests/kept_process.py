"""What code under test sets for its own process, beside the environment, ends with the test."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def settings() -> list[tuple[Any, Callable[[Any], object]]]:
    """Values that a later test could see, each with what sets it."""
    found: list[tuple[Any, Callable[[Any], object]]] = [
        (os.getcwd(), os.chdir),
        (gc.isenabled(), lambda is_on: gc.enable() if is_on else gc.disable()),
        (gc.get_threshold(), lambda thresholds: gc.set_threshold(*thresholds)),
        (sys.getswitchinterval(), sys.setswitchinterval),
        (socket.getdefaulttimeout(), socket.setdefaulttimeout),
        (logging.root.manager.disable, logging.disable),
        (logging.root.level, logging.root.setLevel),
    ]
    found += [(signal.getsignal(number), partial(signal.signal, number)) for number in SIGNALS]
    if torch := sys.modules.get("torch"):
        found += [
            (torch.get_num_threads(), torch.set_num_threads),
            (torch.get_default_dtype(), torch.set_default_dtype),
        ]
    return found


@contextmanager
def kept_process() -> Iterator[None]:
    """At the end these settings are what they were at the beginning."""
    before = settings()
    try:
        yield
    finally:
        for (value, restore), (now, _) in zip(before, settings(), strict=False):
            if now != value:
                restore(value)
