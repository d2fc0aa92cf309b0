"""The process that checks grammars: what ends it, bounds it and outlives it."""

from __future__ import annotations

import asyncio
import resource
import signal
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from benchmarks.hostile_grammars import HOSTILE
from pd_cluster.errors import InvalidRequest, Overloaded
from pd_cluster.server.grammar import grammar_checks
from pd_cluster.server.grammar.grammar_checks import MAX_GRAMMAR_BYTES, GrammarChecks
from pd_cluster.server.grammar.grammar_source import GrammarSource
from pd_cluster.server.params.sampling import SAMPLING_PARAM
from tests.deadlines import HANG_S
from tests.server.live_server import MODEL_DIR

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.anyio
pytest.importorskip("llguidance")
A = GrammarSource("regex", "regex", "a")
HOSTILE_SOURCE = GrammarSource("regex", "grammar", HOSTILE["300 regexes at once"][0](0)["guided_grammar"])


@pytest.mark.long
async def test_a_check_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = GrammarChecks(MODEL_DIR, 3072)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_checks, "CHECK_DEADLINE_S", 0.0)
        with pytest.raises(InvalidRequest, match="too much time or memory"):
            await checks.grammar(GrammarSource("regex", "regex", "a"), 1)
    assert await checks.grammar(GrammarSource("regex", "regex", "a"), 1)
    checks.close()


@pytest.mark.long
async def test_a_process_that_died_between_checks_refuses_no_grammar() -> None:
    """Memory that ran short, for example, says nothing about the next grammar."""
    checks = GrammarChecks(MODEL_DIR, 3072)
    assert await checks.grammar(A, 1)
    assert checks._process is not None
    checks._process.kill()
    checks._process.wait()
    assert await checks.grammar(GrammarSource("regex", "regex", "b"), 1)
    checks.close()


@pytest.mark.long
async def test_a_stopped_process_is_killed_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is longer than its pipe, so that the write waits too."""
    checks = GrammarChecks(MODEL_DIR, 3072)
    assert await checks.grammar(A, 1)
    monkeypatch.setattr(grammar_checks, "CHECK_DEADLINE_S", 0.1)
    assert checks._process is not None
    checks._process.send_signal(signal.SIGSTOP)
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        await checks.check('"' * (3 * MAX_GRAMMAR_BYTES), SAMPLING_PARAM)
    checks.close()


@pytest.mark.long
async def test_a_request_waits_for_hostile_ones_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = GrammarChecks(MODEL_DIR, 3072)
    assert await checks.grammar(A, 1)
    hostile = asyncio.create_task(checks.grammar(HOSTILE_SOURCE, 1))
    await asyncio.sleep(0)  # its check has begun
    monkeypatch.setattr(grammar_checks, "REQUEST_DEADLINE_S", 0.01)
    assert await checks.grammar(A, 1), "kept"
    with pytest.raises(Overloaded, match="not checked within"):
        await checks.grammar(GrammarSource("regex", "regex", "b"), 1)
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        await hostile
    checks.close()


@pytest.mark.long
async def test_closing_waits_for_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "CHECK_DEADLINE_S", 10 * HANG_S)  # what it would wait for
    checks = GrammarChecks(MODEL_DIR, 3072)
    assert await checks.grammar(A, 1)
    process = checks._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    asked = [asyncio.create_task(checks.grammar(GrammarSource("regex", "regex", f"{at}"), 1)) for at in range(30)]
    await asyncio.sleep(0)
    checks.close()
    assert process.poll() is not None
    assert checks._process is None
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(answer, asyncio.CancelledError) for answer in answers) >= 29, "the first may have begun"


@pytest.mark.long
async def test_a_process_that_cannot_be_started_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    checks = GrammarChecks(MODEL_DIR, 3072)
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", fail)
        with pytest.raises(Overloaded, match=r"cannot be started: .*Too many open files"):
            await checks.grammar(A, 1)
    assert await checks.grammar(A, 1)
    checks.close()


@pytest.mark.long
async def test_answers_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_KEPT", 2)
    checks = GrammarChecks(MODEL_DIR, 3072)
    for value in ("a", "(", "a", "b", "("):  # "(" is the one that was used least recently when "b" comes
        source = GrammarSource("regex", "regex", value)
        if value == "(":
            with pytest.raises(InvalidRequest, match="invalid regex"):
                await checks.grammar(source, 1)
        else:
            assert await checks.grammar(source, 1)
    assert [msgspec.json.decode(request)["value"] for request in checks._answers] == ["b", "("]
    assert len(checks._answers) == 2
    checks.close()


@pytest.mark.long
async def test_the_engine_compiles_whatever_passes_under_any_stack_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit a thread gets less than with one. 1,000 rules in a chain overflowed the engine's 2 MB."""
    limits = resource.getrlimit(resource.RLIMIT_STACK)
    if limits[1] != resource.RLIM_INFINITY:
        pytest.skip("the stack has a hard limit")
    rules = "\n".join(f"r{i}:r{i + 1}" for i in range(1000))
    chain = GrammarSource("guided_grammar", "grammar", f'start: r0\n{rules}\nr1000:"a"')
    start = GrammarChecks._start

    def start_unlimited(checks: GrammarChecks) -> subprocess.Popen[bytes]:
        resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, limits[1]))
        try:
            return start(checks)
        finally:
            resource.setrlimit(resource.RLIMIT_STACK, limits)

    monkeypatch.setattr(GrammarChecks, "_start", start_unlimited)
    checks = GrammarChecks(MODEL_DIR, 3072)
    assert await checks.grammar(A, 1)
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        await checks.grammar(chain, 1)
    checks.close()
