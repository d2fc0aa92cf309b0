"""Variables that code under test sets for its own process end with the test."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def kept_environment() -> Iterator[None]:
    """At the end the environment is what it was at the beginning.

    A group of ranks sets its interface, torch the place of its compiler's cache. A command in an environment other than
    the fork server's is executed: it takes ten times as long, and its hook is not called.
    """
    before = _raw().copy()
    try:
        yield
    finally:
        if _raw() != before:
            _restore(before)


def _raw() -> dict[bytes, bytes]:
    """The bytes that `os.environ` keeps: to decode all of them took a sixth of what surrounds each test."""
    return os.environ._data  # type: ignore[attr-defined,no-any-return]


def _restore(before: Mapping[bytes, bytes]) -> None:
    """Only what changed: threads of libraries may read the others meanwhile. Pytest's own variable always has."""
    now = _raw()
    for name in [name for name in now if name not in before]:
        del os.environb[name]
    for name, value in before.items():
        if now.get(name) != value:
            os.environb[name] = value
