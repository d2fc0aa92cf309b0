"""Gates that hold sequences at a chosen token, so that "D reads while P computes the rest" is a state and no race.

    gate = Gate(directory, "p0")
    node = launcher.node("prefill", *gate.flags, environment=gate.environment)
    with gate.held(prompt=512):  # no step computes a sequence that has 512 tokens or more
        ...                      # all else goes on: messages, heartbeats, renewals, aborts, shorter sequences
    with gate.held(answer=20):   # or one with an answer of 20 tokens
        ...
    with gate.impatient():       # a patient node judges silence as the product does
        ...

A limit holds what comes after it was set. `held_nixl` is the node's side.

A patient node is for tests that are not about silence: a busy machine may keep a healthy process waiting for seconds.
It is not judged frozen by its silence, and as a reader it waits for the answers of a prefill node that is silent. Its
API process waits for that node's HTTP, too (the hook `hear_patiently`, see tests/fork_server.py): the product gives it
3 s, and on one crowded core a healthy P was silent for longer in one of seven runs.
"""

from __future__ import annotations

import contextlib
import os
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from unittest import mock

from tests.patient_node import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

T = TypeVar("T")
VARIABLE = "PD_TEST_GATE"  # in the engine's environment: the path of the gate's file


class Gate:
    """The limits of one node. They outlive its processes.

    The file holds them. A byte in the pipe beside it wakes the engine, which sleeps while it may compute
    nothing.
    """

    def __init__(self, directory: Path, name: str, *, patient: bool = False) -> None:
        self._path = directory / name
        self._pipe = pipe_of(self._path)
        os.mkfifo(self._pipe)
        if patient:
            patience_of(self._path).touch()

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the node."""
        return ("--connector=tests.integration.held_nixl:HeldNixl",)

    @property
    def environment(self) -> Mapping[str, str]:
        """Of the node."""
        return {VARIABLE: str(self._path), "PD_TEST_NODE_HOOK": f"{__name__}:hear_patiently"}

    @contextlib.contextmanager
    def held(self, *, prompt: float = inf, answer: float = inf) -> Iterator[None]:
        """No step computes a sequence of so many tokens, or with an answer of so many, until the end or `let_go`."""
        new = self._path.with_suffix(".new")
        new.write_text(f"{prompt} {answer}")
        new.replace(self._path)  # at once: the engine must not read a part of it
        try:
            yield
        finally:
            self.let_go()

    @contextlib.contextmanager
    def impatient(self) -> Iterator[None]:
        """A patient node is as others for what begins before the end."""
        patience_of(self._path).unlink()
        try:
            yield
        finally:
            patience_of(self._path).touch()

    def let_go(self) -> None:
        """What is held goes on. Idempotent."""
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # no engine runs
            pipe = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"\0")
            os.close(pipe)


def pipe_of(path: Path) -> Path:
    """The pipe of the gate with its file at `path`."""
    return path.with_suffix(".pipe")


def patience_of(path: Path) -> Path:
    """It is there while the node of the gate with its file at `path` is patient."""
    return path.with_suffix(".patient")


def hear_patiently() -> None:
    """In a node's API process, before it starts."""
    from pd_cluster.server import app
    from pd_cluster.server.requests import prefill_client
    from pd_connectors.protocol import clock

    patience, patiently = patience_of(Path(os.environ[VARIABLE])), clock.patiently

    async def wait(work: Coroutine[None, None, T], silence_s: float) -> T:
        return await patiently(work, PATIENCE_S if patience.exists() else silence_s)

    mock.patch.object(prefill_client, "patiently", wait).start()
    mock.patch.object(app, "CONNECT_DEADLINE_S", PATIENCE_S).start()
