"""The process of grammar checks and its forks, as one of them dies or stands still: no check waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from pd_cluster.server.grammar.grammar_checks import GrammarChecks
from pd_cluster.server.grammar.grammar_source import GrammarSource
from tests.deadlines import HANG_S
from tests.server.live_server import MODEL_DIR

pytestmark = pytest.mark.anyio
llguidance = pytest.importorskip("llguidance")
A = GrammarSource("regex", "regex", "a")


def process_of(checks: GrammarChecks) -> psutil.Process:
    assert checks._process is not None
    return psutil.Process(checks._process.pid)


def has_ended(process: psutil.Process) -> bool:
    """Whether its parent can reap it: its first thread may be a zombie before the last one has ended."""
    return process.status() == psutil.STATUS_ZOMBIE and len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1


@pytest.mark.long
async def test_a_fork_that_died_between_checks_refuses_no_grammar() -> None:
    checks = GrammarChecks(MODEL_DIR, 3072)
    assert await checks.grammar(A, 1)
    parent = process_of(checks)
    for value in ("b", "c"):
        [fork] = parent.children()
        fork.kill()
        while not has_ended(fork):  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.001)
        assert await checks.grammar(GrammarSource("regex", "regex", value), 1)
        assert process_of(checks) == parent
    [fork] = parent.children()
    fork.suspend()
    checks.close()
    fork.wait(HANG_S)


@pytest.mark.long
@pytest.mark.parametrize("when", ["between checks", "at the end"])
async def test_a_stopped_fork_does_not_outlive_its_parent(when: str) -> None:
    """It has the pipes too: a wait for their end is a wait for the fork."""
    checks = GrammarChecks(MODEL_DIR, 3072)
    assert await checks.grammar(A, 1)
    parent = process_of(checks)
    [fork] = parent.children()
    fork.suspend()
    parent.kill()
    while not has_ended(parent):  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.001)
    if when == "between checks":
        assert await checks.grammar(GrammarSource("regex", "regex", "b"), 1)
    await asyncio.to_thread(checks.close)
    fork.wait(HANG_S)
