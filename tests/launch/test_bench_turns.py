"""Conversations: what is drawn, what is sent, and their statistics, against a small server and hand-made records."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.routing_simulation.turns import prompt_tokens
from pd_cluster.bench.statistics import RequestRecord
from pd_cluster.bench.talk import TOOLS, ChatTalk, IdsTalk, draw_texts
from pd_cluster.bench.turn_statistics import steady_window, summarize_turns
from pd_cluster.bench.turns import Conversation, PlannedTurn, TurnsPlan
from pd_cluster.bench.workload import Length
from pd_cluster.errors import StartupError
from pd_cluster.launch.cli import main
from tests.launch.test_bench_serve import serving

if TYPE_CHECKING:
    from pathlib import Path

PLAN = TurnsPlan(num_conversations=40, num_turns=Length(2, 30), num_heads=3)
SMALL = "--turns 3 --num-requests 4 --history 30:90 --head-len 20 --input-len 4:9 --output-len 2:5 --tool-s 0.001"


def test_equal_seeds_draw_equal_conversations_within_the_lengths() -> None:
    drawn = PLAN.conversations(3)
    assert drawn == PLAN.conversations(3) != PLAN.conversations(4)
    assert drawn[:10] == replace(PLAN, num_conversations=10).conversations(3), "more of them change no earlier one"
    for one in drawn:
        assert (one.num_head, one.head) == (8_000, one.index % 3)
        assert 1 <= len(one.turns) <= 30
        assert all(20_000 < prompt <= 60_000 for prompt in prompt_tokens(one))
        assert all(200 <= turn.num_output <= 400 and turn.pause_s >= 0 for turn in one.turns)
        assert all(1_000 <= turn.num_new <= 6_000 for turn in one.turns[1:])
        assert 13_000 <= one.turns[0].num_new <= 18_000, "what is no head is its own"
    assert max(prompt for one in drawn for prompt in prompt_tokens(one)) > 50_000
    pauses = [turn.pause_s for one in drawn for turn in one.turns]
    assert sum(pauses) / len(pauses) == pytest.approx(1.0, rel=0.2)
    times = [one.at_s for one in drawn]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(390, rel=0.5)
    assert {one.at_s for one in replace(PLAN, at_once=8).conversations(3)} == {0.0}


def test_prompts_of_known_turns() -> None:
    one = Conversation(0, 0.0, 0, 10, (PlannedTurn(5, 3, 0.0), PlannedTurn(4, 2, 0.0), PlannedTurn(1, 9, 0.0)))
    assert prompt_tokens(one) == [15, 22, 25]


def test_heads_are_shared_and_nothing_else() -> None:
    drawn = [replace(one, num_head=50) for one in PLAN.conversations(0)[:4]]
    texts = [draw_texts(one, range(5_000), 7) for one in drawn]
    assert texts[0][0] == texts[3][0] != texts[1][0]
    assert texts == [draw_texts(one, range(5_000), 7) for one in drawn]
    assert texts[0][1][:50] != texts[3][1][:50]
    assert [len(part) for part in texts[0][1:]] == [turn.num_new for turn in drawn[0].turns]


def test_scaled_lengths_keep_their_proportions() -> None:
    small = PLAN.scaled(0.01)
    assert (small.history, small.new, small.output, small.num_head) == (
        Length(200, 600), Length(10, 60), Length(2, 4), 80
    )  # fmt: skip
    assert small.num_turns == PLAN.num_turns


@pytest.mark.parametrize(
    "changes",
    [{"num_head": 20_001}, {"num_head": -1}, {"history": Length(20_000, 25_000)}, {"num_heads": 0}, {"at_once": 41}],
)
def test_impossible_plans_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(StartupError):
        replace(PLAN, **changes).conversations(0)


def test_ids_are_the_prompt_before_its_answer_and_new_ones() -> None:
    talk = IdsTalk([1, 2], [[3], [4, 5]])
    assert talk.ask(0)["prompt"] == [1, 2, 3]
    talk.hear({"choices": [{"text": "a", "token_ids": [8]}]})
    talk.hear({"choices": [{"text": "", "token_ids": [9]}]})
    talk.hear({"choices": [], "usage": {}})
    assert talk.ask(1) == {"prompt": [1, 2, 3, 8, 9, 4, 5], "return_token_ids": True}


def test_chats_send_calls_back_with_results_and_no_reasoning() -> None:
    talk = ChatTalk("head", ["one", "two", "three"])
    assert talk.ask(0) == {
        "messages": [{"role": "system", "content": "head"}, {"role": "user", "content": "one"}], "tools": TOOLS
    }  # fmt: skip
    for number, name in enumerate(("read_file", "run_command")):
        for piece in (
            {"id": f"c{number}", "function": {"name": name, "arguments": ""}},
            {"function": {"arguments": "{}"}},
        ):
            talk.hear({"choices": [{"delta": {"reasoning_content": "hm", "tool_calls": [piece | {"index": number}]}}]})
    *_, answer, first, second = talk.ask(1)["messages"]
    assert [call["function"] for call in answer["tool_calls"]] == [
        {"name": "read_file", "arguments": "{}"}, {"name": "run_command", "arguments": "{}"}
    ]  # fmt: skip
    assert first == {"role": "tool", "tool_call_id": "c0", "content": "done"}
    assert second == {"role": "tool", "tool_call_id": "c1", "content": "two"}
    talk.hear({"choices": [{"delta": {"content": "x"}}, {"delta": {"content": "y"}}]})
    assert talk.ask(2)["messages"][-2:] == [
        {"role": "assistant", "content": "xy"},
        {"role": "user", "content": "three"},
    ]


def record(conversation: int, turn: int, sent_s: float, end_s: float, **more: Any) -> RequestRecord:
    """First tokens come after 0.5 s, or 2 s in turn 2."""
    first_s = sent_s + (2.0 if turn == 2 else 0.5)
    one = RequestRecord(
        0, sent_s, sent_s, 100 + 20 * turn, 10, [first_s, end_s], end_s, conversation=conversation, turn=turn
    )
    for name, value in more.items():
        setattr(one, name, value)
    return one


def conversation(index: int, begin_s: float, **more: Any) -> list[RequestRecord]:
    """Three turns of 3 s each; all but the first find the prompt before and half of its answer."""
    return [
        record(index, turn, begin_s + 3 * turn, begin_s + 3 * turn + 3, num_cached=turn and 85 + 20 * turn, **more)
        for turn in range(3)
    ]


def test_a_closed_loop_counts_while_all_run() -> None:
    """Two at once: 0 and 1, then 2 and 3 as these end. From 18 s on there is none to follow."""
    records = [*conversation(0, 0.0), *conversation(1, 0.5), *conversation(2, 9.0), *conversation(3, 9.5)]
    assert steady_window(records, 2) == (3.5, 18.0)
    found = summarize_turns(records, 12, 2, 1000.0, 5000.0)
    assert found.whole.num_requests == 9, "not the first two, nor the one sent at 3.0"
    assert found.whole.request_rate == pytest.approx(9 / 14.5), "of those that ended meanwhile"
    assert found.whole.output_rate == pytest.approx(90 / 14.5)
    assert (found.num_requests, found.num_conversations, found.num_unasked, found.errors) == (12, 4, 0, {})
    assert steady_window(records, 0) is None
    assert steady_window(records, 5) is None
    assert summarize_turns(records, 12, 0, 1000.0, 5000.0).whole.num_requests == 12


def test_first_and_later_turns_are_apart() -> None:
    records = [*conversation(0, 0.0, route="direct", predicted_s=1.0), *conversation(1, 20.0, route="p-first")]
    found = summarize_turns(records, 6, 0, 1000.0, 2000.0)
    first, later = found.parts["first turns"], found.parts["later turns"]
    assert (first.spreads["ttft"].p50_ms, first.num_ok) == pytest.approx((500.0, 2))
    assert (later.spreads["ttft"].p50_ms, later.spreads["ttft"].max_ms) == pytest.approx((1250.0, 2000.0))
    assert later.input_tokens * (1 - later.cached_share) == pytest.approx(2 * (15 + 15)), "uncached tokens"
    assert (found.found_history, found.found_answers) == (1.0, 0.5)
    direct = found.parts["direct"]
    assert direct.spreads["predicted"].p50_ms == 1000.0
    assert direct.spreads["predicted of a second"].p50_ms == pytest.approx(2000.0), "predicted 1 s, real 0.5 s"
    assert "predicted" not in found.parts["p-first"].spreads
    assert found.attained == {"later TTFT": 0.5, "longest gap": pytest.approx(1 / 3), "both": 0.0}


def test_failures_are_named_wherever_they_are_and_attain_nothing() -> None:
    records = [*conversation(0, 0.0), *conversation(1, 0.5), *conversation(2, 9.0), *conversation(3, 9.5)]
    records[0].error = records[4].error = "HTTP 503"
    found = summarize_turns(records, 14, 2, 5000.0, 5000.0)
    assert (found.errors, found.num_unasked) == ({"HTTP 503": 2}, 2), "one of them in the warm-up"
    assert found.whole.num_requests - found.whole.num_ok == 1
    assert found.attained["later TTFT"] < 1.0
    assert found.attained["longest gap"] == pytest.approx(8 / 9)


@pytest.mark.long
@pytest.mark.parametrize("loop", ["--at-once 2", "--rate inf"])
def test_the_command(loop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    with serving() as server:
        server.more_headers = {"x-pd-predicted-ttft": "0.283"}
        arguments = f"bench serve --url {server.url} {SMALL} {loop} --warmup 1 --json {out} --plot {plot}"
        assert main(arguments.split()) == 0
    captured = capsys.readouterr()
    assert "12/12 requests" in captured.err
    assert "12 requests, 4 conversations, 0 not asked" in captured.out
    assert "p-first; reason=default: TTFT as predicted, ms" in captured.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.read_text())
    assert [(one["conversation"], one["turn"]) for one in found["requests"]] == [
        (c, t) for c in range(4) for t in range(3)
    ]
    assert {one["predicted_s"] for one in found["requests"]} == {0.283}
    prompts = [body["prompt"] for body in server.bodies]
    for one in found["requests"]:
        asked = next(prompt for prompt in prompts if len(prompt) == one["num_input"])
        assert set(asked) <= {*range(5), 5, 6, 7, 8}, "ids of /tokenize, and those of answers"
    grown = sorted(one["num_input"] for one in found["requests"] if one["turn"] == 2)
    assert grown == sorted(prompt_tokens(one)[2] for one in planned(found["config"]))


def planned(config: dict[str, Any]) -> list[Conversation]:
    plan = TurnsPlan(
        num_conversations=4, num_turns=Length(3, 3), history=Length(30, 90), new=Length(4, 9), output=Length(2, 5),
        num_head=20, tool_s=0.001, at_once=config["at_once"],
    )  # fmt: skip
    return plan.conversations(config["seed"])


def test_chats_with_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    with serving() as server:
        arguments = f"bench serve --url {server.url} {SMALL} --rate inf --text --warmup 0 --json {out}"
        assert main(arguments.split()) == 0
    roles = [[message["role"] for message in body["messages"]] for body in server.bodies]
    assert max(roles, key=len) == ["system", "user", "assistant", "tool", "assistant", "user"]
    summary = json.loads(out.read_text())["summary"]
    assert summary["found_history"] == pytest.approx((20 + 21) / (20 + 40)), "prompts of 20 and 40 tokens, 21 found"
    assert 0 < summary["found_answers"] < 0.5
    assert "found again in the cache by later turns: 68.3%" in capsys.readouterr().out


def test_a_wrong_length_is_an_error_and_ends_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.short_of = 45
        assert main(f"bench serve --url {server.url} {SMALL} --rate inf --warmup 0".split()) == 1
    shown = capsys.readouterr().out
    assert "failed: an answer of a wrong length" in shown
    assert ", 0 not asked" not in shown


def test_turns_go_with_no_other_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--turns=3", "--workload=edits"]) == 2
    assert "--turns goes with none of" in capsys.readouterr().err
