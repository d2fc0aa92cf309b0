"""Variables that code under test sets for its own process end with the test."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def kept_environment() -> Iterator[None]:
    """At the end the environment is what it was at the beginning.

    A group of ranks sets its interface, torch the place of its compiler's cache. A command in an environment other than
    the fork server's is executed: it takes ten times as long, and its hook is not called.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        # Only what changed: threads of libraries may read the others meanwhile
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
