"""Checks of grammars by client: which is next, how many may wait. Without a process."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.errors import Overloaded, TooManyChecks
from pd_cluster.server.grammar import check_turns, grammar_checks
from pd_cluster.server.grammar.check_turns import MAX_OF_CLIENT, MAX_WAITING, Check, CheckTurns
from pd_cluster.server.grammar.grammar_checks import GrammarChecks
from pd_cluster.server.grammar.grammar_source import GrammarSource
from tests.deadlines import HANG_S
from tests.server.live_server import MODEL_DIR

pytestmark = pytest.mark.anyio
pytest.importorskip("llguidance")


def check(client: str, number: int) -> Check:
    return client, str(number).encode()


@pytest.mark.long
@given(st.lists(st.sampled_from(["push a", "push b", "push c", "take"]), max_size=60))
def test_every_check_is_taken_once_and_no_client_waits_for_two_of_another(events: list[str]) -> None:
    turns, waiting, since = CheckTurns(), dict[str, list[Check]](), dict[str, list[str]]()
    for number, event in enumerate((*events, *(["take"] * len(events)))):
        if event != "take":
            one = check(event[-1], number)
            if turns.push(one) is None:
                waiting.setdefault(one[0], []).append(one)
            continue
        taken = turns.take()
        assert (taken is None) == (not any(waiting.values()))
        if taken is None:
            continue
        assert waiting[taken[0]].pop(0) == taken
        for client, line in waiting.items():
            served = since.setdefault(client, [])
            served.append(taken[0])
            if client == taken[0] or not line:
                served.clear()
            assert all(served.count(other) <= 1 for other in served), f"{client} waits"
    assert turns.take() is None


def test_the_newest_of_the_longest_line_leaves_when_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = CheckTurns()
    assert [turns.push(check("a", n)) for n in range(MAX_OF_CLIENT)] == [None] * MAX_OF_CLIENT
    assert turns.push(check("a", 99)) == check("a", 99)
    monkeypatch.setattr(check_turns, "MAX_WAITING", MAX_OF_CLIENT)
    assert turns.push(check("b", 0)) == check("a", MAX_OF_CLIENT - 1)
    assert turns.push(check("b", 1)) == check("a", MAX_OF_CLIENT - 2)
    assert [turns.take() for _ in range(3)] == [check("a", 0), check("b", 0), check("a", 1)]
    assert MAX_WAITING >= MAX_OF_CLIENT


def test_a_client_has_no_turn_when_its_only_check_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_turns, "MAX_WAITING", 2)
    turns = CheckTurns()
    assert [turns.push(check(client, 0)) for client in "abc"] == [None, None, check("c", 0)]
    assert [turns.take() for _ in range(3)] == [check("a", 0), check("b", 0), None]


def test_a_client_that_ended_a_process_goes_last_until_one_ends_none() -> None:
    turns = CheckTurns()
    turns.note("a", ended_process=True)
    for client in "abc":
        for number in range(2):
            turns.push(check(client, number))
    assert [(turns.take() or ("", b""))[0] for _ in range(5)] == ["b", "c", "b", "c", "a"]
    turns.note("a", ended_process=False)
    turns.push(check("b", 2))
    assert turns.take() == check("a", 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The values that the process was asked for, by order. It ends by those that begin with `end`."""
    seen: list[str] = []

    def ask(self: GrammarChecks, request: bytes) -> dict[str, str] | None:
        value = msgspec.json.decode(request)["value"]
        seen.append(value)
        return None if value.startswith("end") else {"grammar": value}

    monkeypatch.setattr(GrammarChecks, "_ask", ask)
    return seen


def source(value: str) -> GrammarSource:
    return GrammarSource("regex", "regex", value)


async def test_beside_64_of_another_client_one_check_is_the_next_but_one(asked: list[str]) -> None:
    checks = GrammarChecks(MODEL_DIR, 3072)
    assert await checks.grammar(source("known"), 1, "b") == "known"
    hostile = [asyncio.create_task(checks.grammar(source(f"a{n}"), 1, "a")) for n in range(64)]
    await asyncio.sleep(0)
    assert await checks.grammar(source("known"), 1, "b") == "known"
    assert len(asked) <= 2, "a known one waits for none"
    assert await checks.grammar(source("new"), 1, "b") == "new"
    assert asked.index("new") <= 3
    answers = await asyncio.gather(*hostile, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, TooManyChecks)]
    assert len(refused) == 64 - MAX_OF_CLIENT
    assert (refused[0].status, refused[0].retry_after_s) == (429, 5)
    checks.close()


async def test_a_client_of_hostile_ones_goes_last(asked: list[str]) -> None:
    checks = GrammarChecks(MODEL_DIR, 3072)
    hostile = [asyncio.create_task(checks.grammar(source(f"end{n}"), 1, "a")) for n in range(8)]
    while not asked:  # noqa: ASYNC110 - a thread tells it
        await asyncio.sleep(0)
    others = [asyncio.create_task(checks.grammar(source(f"b{n}"), 1, "b")) for n in range(8)]
    await asyncio.gather(*others)
    assert sum(value.startswith("end") for value in asked) <= 4
    await asyncio.gather(*hostile, return_exceptions=True)
    checks.close()


async def test_many_requests_with_one_new_schema_are_one_check(asked: list[str]) -> None:
    checks = GrammarChecks(MODEL_DIR, 3072)
    jobs = [checks.grammar(source("new"), 1, client) for client in "aabb" for _ in range(50)]
    assert set(await asyncio.gather(*jobs)) == {"new"}
    assert asked == ["new"]
    checks.close()


async def test_a_check_goes_on_when_its_first_request_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(self: GrammarChecks, request: bytes) -> dict[str, str]:
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(HANG_S)
        return {"grammar": "x"}

    monkeypatch.setattr(GrammarChecks, "_ask", ask)
    checks = GrammarChecks(MODEL_DIR, 3072)
    first = asyncio.create_task(checks.grammar(source("a"), 1, "a"))
    second = asyncio.create_task(checks.grammar(source("a"), 1, "a"))
    await asyncio.sleep(0)
    first.cancel()
    with monkeypatch.context() as patch:
        patch.setattr(grammar_checks, "REQUEST_DEADLINE_S", 0.0)
        with pytest.raises(Overloaded, match="not checked within"):
            await checks.grammar(source("b"), 1, "b")
    go_on.set()
    assert await second == "x"
    assert await checks.grammar(source("b"), 1, "b") == "x"
    checks.close()
