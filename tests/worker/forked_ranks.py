"""Ranks and engines forked from the server of all workers: 0.8 s of CPU for a rank's life in place of 3.3 s."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_cluster.worker.rank_frames import RankStart
from pd_cluster.worker.ranks import Ranks
from tests.cluster import FORK_SERVER, ROOT
from tests.fork_server import SHARED_ENV

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fork_server import Forked


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Where workers share a server. A test alone would wait longer for a server than for a rank of its own.

    tests/worker/test_states.py keeps the real command.
    """
    with pytest.MonkeyPatch.context() as patch:
        if SHARED_ENV in os.environ:
            patch.setattr(Ranks, "_spawn", _fork)
        yield


def _fork(ranks: Any, rank: int, store_port: int) -> Forked:
    """As `Ranks._spawn`."""
    return fork_rank(ranks.module, RankStart(ranks.config, rank, ranks._address, store_port))


def fork_rank(module: str, start: object, *arguments: str) -> Forked:
    """`python -m MODULE ARGUMENTS` from the workers' server, with `start` on its standard input. Or an engine."""
    theirs, ours = os.pipe()
    process = FORK_SERVER.fork(module, arguments, os.environ, ROOT, (theirs, 1, 2))
    os.close(theirs)
    process.stdin = os.fdopen(ours, "wb")
    with suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        process.stdin.flush()
    return process
