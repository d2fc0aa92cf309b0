"""Conversations: what is drawn, what is sent, and their statistics, against a small server and hand-made records."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.presets import TURNS
from benchmarks.routing_simulation.turns import prompt_tokens
from benchmarks.turn_rows import turn_row
from pd_cluster.bench.load import Target
from pd_cluster.bench.serve_turns import measure_turns
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
            {"id": f"c{number}", "function": {"name": name, "arguments": "", "strict": True}},
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
    """Two at once: 0 and 1, then 2 and 3 as these end. From 18 s on there is none to follow. A slow start counts."""
    records = [*conversation(0, 0.0), *conversation(1, 0.5), *conversation(2, 9.0), *conversation(3, 9.5)]
    assert steady_window(records, 2) == (0.0, 18.0)
    found = summarize_turns(records, [3] * 4, 2, 1000.0, 5000.0)
    assert found.whole.num_requests == 10, "not the first two"
    assert found.whole.request_rate == pytest.approx(11 / 18), "of those that ended meanwhile"
    assert found.whole.output_rate == pytest.approx(110 / 18)
    assert (found.num_requests, found.num_conversations, found.num_unasked, found.errors) == (12, 4, 0, {})
    left_out = found.parts["left out"]
    assert left_out.num_requests == 2
    assert left_out.spreads["ttft"].p50_ms == pytest.approx(500.0)
    assert turn_row("2M", found)[-1] == "17% 500/500"


def test_a_stall_at_the_start_of_a_closed_loop_stays_in_view() -> None:
    records = [*conversation(0, 0.0), *conversation(1, 0.0), *conversation(2, 9.0), *conversation(3, 9.0)]
    records[3].chunk_times_s, records[3].end_s = [8.0, 9.0], 9.0
    for one in records[4:6]:
        one.sent_s, one.end_s, one.chunk_times_s = one.sent_s + 6, one.end_s + 6, [t + 6 for t in one.chunk_times_s]
    found = summarize_turns(records, [3] * 4, 2, 1000.0, 5000.0)
    assert found.parts["left out"].spreads["ttft"].max_ms == 8000.0
    assert found.whole.num_requests == 10, "what the others sent meanwhile"


def test_an_open_loop_counts_without_ramp_and_drain() -> None:
    """Conversations of 9 s, one every 3 s from 0 to 27: from 9 to 27."""
    records = [one for index in range(10) for one in conversation(index, 3.0 * index)]
    assert steady_window(records, 0) == (9.0, 27.0)
    found = summarize_turns(records, [3] * 10, 0, 1000.0, 5000.0)
    assert found.whole.num_requests == 21, "three at each of seven times"
    assert found.parts["left out"].num_requests == 9
    at_once = [one for index in range(3) for one in conversation(index, 0.0)]
    assert steady_window(at_once, 0) is None, "all arrive at once"
    assert summarize_turns(at_once, [3] * 3, 0, 1000.0, 5000.0).whole.num_requests == 9


@pytest.mark.parametrize(("at_once", "step_s", "share"), [(0, 0.0, 0.5), (0, 3.0, 8 / 18), (5, 0.0, 0.5)])
def test_turns_that_were_not_asked_attain_nothing(at_once: int, step_s: float, share: float) -> None:
    """Each second conversation is refused at its first turn, and would have had as many as the others."""
    records = list[RequestRecord]()
    for index in range(10):
        some = conversation(index, step_s * index)
        if index % 2:
            some, some[0].error = some[:1], "HTTP 503"
        records += some
    found = summarize_turns(records, [3] * 10, at_once, 5000.0, 5000.0)
    assert found.num_unasked == 10
    assert found.attained["later TTFT"] == found.attained["both"] == pytest.approx(share)


def test_first_and_later_turns_are_apart() -> None:
    records = [*conversation(0, 0.0, route="direct", predicted_s=1.0), *conversation(1, 0.0, route="p-first")]
    found = summarize_turns(records, [3, 3], 0, 1000.0, 2000.0)
    first, later = found.parts["first turns"], found.parts["later turns"]
    assert (first.spreads["ttft"].p50_ms, first.num_ok) == pytest.approx((500.0, 2))
    assert (later.spreads["ttft"].p50_ms, later.spreads["ttft"].max_ms) == pytest.approx((1250.0, 2000.0))
    assert later.input_tokens * (1 - later.cached_share) == pytest.approx(2 * (15 + 15)), "uncached tokens"
    assert (found.found_history, found.found_answers) == (1.0, 0.5)
    direct = found.parts["direct"]
    assert direct.spreads["predicted"].p50_ms == 1000.0
    assert direct.spreads["real of predicted"].p50_ms == pytest.approx(500.0), "real 0.5 s, predicted 1 s"
    assert "predicted" not in found.parts["p-first"].spreads
    assert found.attained == {"later TTFT": 0.5, "longest gap": pytest.approx(1 / 3), "both": 0.0}


def test_failures_are_named_wherever_they_are_and_attain_nothing() -> None:
    records = [*conversation(0, 0.0), *conversation(1, 0.5), *conversation(2, 9.0), *conversation(3, 9.5)]
    records[0].error = records[4].error = "HTTP 503"
    found = summarize_turns(records, [4, 4, 3, 3], 2, 5000.0, 5000.0)
    assert (found.errors, found.num_unasked) == ({"HTTP 503": 2}, 2), "one of them in the warm-up"
    assert found.whole.num_requests - found.whole.num_ok == 1
    assert found.attained["later TTFT"] < 1.0
    assert found.attained["longest gap"] == pytest.approx(9 / 12)


@pytest.mark.long
@pytest.mark.parametrize("loop", ["--at-once 2 --plot", "--rate inf"])
def test_the_command(loop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    with serving() as server:
        server.more_headers = {"x-pd-predicted-ttft": "0.283"}
        arguments = f"bench serve --url {server.url} {SMALL} --warmup 1 --json {out} {loop}"
        assert main([*arguments.split(), *[str(plot)] * ("--plot" in loop)]) == 0
    captured = capsys.readouterr()
    assert "12/12 requests" in captured.err
    assert "12 requests, 4 conversations, 0 not asked" in captured.out
    assert "p-first; reason=default: TTFT as predicted, ms" in captured.out
    assert "--plot" not in loop or plot.read_bytes().startswith(b"\x89PNG")
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


def test_ids_that_were_not_told_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.ignores_ids = True
        assert main(f"bench serve --url {server.url} {SMALL} --rate inf --warmup 0".split()) == 1
    assert "tokens: does the server know return_token_ids?" in " ".join(capsys.readouterr().out.split())


def test_runs_of_one_seed_have_salts_of_their_own_and_plans_other_texts() -> None:
    plan = TurnsPlan(
        num_conversations=1, num_turns=Length(1, 1), history=Length(9, 99), new=Length(1, 1), output=Length(1, 1),
        num_head=9, name="a",
    )  # fmt: skip
    with serving() as server:
        for one in (plan, plan, replace(plan, name="b")):
            asyncio.run(measure_turns(Target(server.url, "fake-model"), one, 5_000, 0, 0, is_text=False))
    first, again, other = server.bodies
    assert len({body["cache_salt"] for body in server.bodies}) == 3
    assert first["prompt"] == again["prompt"] != other["prompt"]
    assert len({preset.plan.name for preset in TURNS.values()}) == len(TURNS)


@pytest.mark.parametrize(("flag", "ignores"), [("", True), ("--text", False), ("--stop-at-eos", False)])
def test_texts_end_by_themselves(flag: str, ignores: bool) -> None:
    with serving() as server:
        assert main(f"bench serve --url {server.url} {SMALL} --rate inf --warmup 0 {flag}".split()) == 0
    assert {body["ignore_eos"] for body in server.bodies} == {ignores}


def test_a_model_of_too_few_positions_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.max_model_len = 94
        assert main(f"bench serve --url {server.url} {SMALL} --rate inf".split()) == 2
    assert "histories and answers of 95 tokens: fake-model has 94 positions" in capsys.readouterr().err
    assert not server.bodies


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--turns 3 --workload edits", "--turns goes with none of: --workload"),
        ("--turns 3 --prediction --max-input-len 9", "--turns goes with none of: --prediction, --max-input-len"),
        ("--turns 3 --at-once 2 --rate 1", "--turns --at-once goes with none of: --rate"),
        ("--text --at-once 2", "--at-once, --text: set --turns too"),
        ("--turns 3 --at-once -1", "must be at least 1"),
        ("--turns 3 --tool-s -3", "must be 0 or more"),
        ("--turns 3 --tool-s nan", "must be 0 or more"),
    ],
)
def test_flags_that_would_do_nothing(flags: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # argparse's own refusal
        assert main(f"bench serve {flags}".split()) == 2
    assert error in capsys.readouterr().err


def test_fewer_gpus_keep_a_closed_loop() -> None:
    assert TURNS["turns"].times(0.05).plan.at_once == 1
    assert TURNS["turns-open"].times(0.05).plan.at_once == 0
