"""Drafts under grammars, with the real worker: answers, ends and caches are those of single tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_cluster.protocol.messages import AddRequest, FinishReason
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.worker.grammars import Grammars, GrammarState
from pd_cluster.worker.logits_stages.grammar_masks import GrammarMasks
from tests.drafters import ScriptedDrafter
from tests.engine.drafting_node import (
    LOOKUP,
    SILENT,
    Answered,
    Node,
    Wanted,
    expect_handoff,
    expect_same,
    num_drafts,
    roomy,
    small,
)
from tests.engine.test_constrained_steps import (
    EOS,
    PERSON,
    WORD,
    FailingBench,
    a_list,
    an_object,
    json_grammar,
    sit_out,
)
from tests.engine.test_core_pipeline import CONFIG
from tests.patient_masks import await_forced, be_patient

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from tests.engine.test_core_pipeline import Bench

__all__ = ["roomy", "small"]

VOCABULARY = json.loads((Path(CONFIG.model.model) / "tokenizer.json").read_text())["model"]["vocab"]
PROMPTS = [
    [(5 * i + j * j) % 200 + 5 for j in range(length)] for i, length in enumerate((40, 3, 33, 17, 64, 16, 31, 9))
]
JSON = json_grammar(a_list(PERSON, 2, 4))
FORCED = json_grammar(an_object(call={"const": "get_weather_of_tomorrow"}, arguments=an_object(city=WORD)))
LAZY = 'start: /[a-z ]{3,9}/ <|im_start|> end\nend: %json {"enum": ["red", "green"]}'
# A mask within the first word after "1" is more than the lexer may do
EXHAUSTING = 'start: /[2-9]/+ "1" X\nX: /(?s:.{1,5000})/ & /(\\S+\\s+){0,99}\\S+/'
SETTINGS: list[dict[str, Any]] = [
    {"grammar": JSON},
    {"grammar": JSON, "temperature": 0.0, "logprobs": 2},
    {"grammar": 'start: /[0-9]{9}/ ("a" | "b"){4,12} "."', "ignore_eos": True, "min_tokens": 16, "temperature": 0.7},
    {"grammar": 'start: "yes, of course" | "no, not at all" | "perhaps"'},
    {"grammar": LAZY, "temperature": 1.3},
    {"grammar": FORCED, "n": 3, "temperature": 1.2},
    {"grammar": JSON, "frequency_penalty": 0.6, "top_k": 50, "logit_bias": {9: 3.0}, "bad_words": ((40, 41),)},
    {"ignore_eos": True, "temperature": 0.9},
]
WANTED = Wanted(PROMPTS, [SamplingParams(max_tokens=36 + i, seed=5 + i, **more) for i, more in enumerate(SETTINGS)])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
def forced(roomy: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count: what grammars force is there at the next step, however late its thread is."""
    await_forced(roomy.executor._grammars, monkeypatch)


@pytest.fixture(scope="module")
def single(roomy: Node, small: Node) -> Answered:
    """Without a drafter."""
    found = WANTED.answered(roomy, small)
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(found.reasons.values())
    return found


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("right", "on"), ("wrong", "off"), ("mixed", "off"), (LOOKUP, "on"), (SILENT, "on")],  # others: preempted
)
def test_drafts_change_no_answer(
    roomy: Node, single: Answered, kind: str, mode: str, request: pytest.FixtureRequest
) -> None:
    if kind == SILENT:
        request.getfixturevalue("forced")
    bench = roomy.bench(kind, mode)
    WANTED.send(bench)
    found = bench.answered()
    expect_same(found, single)
    assert num_drafts(bench) > 20
    assert (found.hashes, found.free) == (single.hashes, single.free)
    if kind == "right":
        assert found.num_steps < 0.8 * single.num_steps


def test_right_drafts_are_accepted(roomy: Node, single: Answered) -> None:
    """Those that the grammar forces, and drawn ones, up to the end of the answer and past it."""
    answers = roomy.answers
    for index in (0, 3, 4):
        whole = single.ids[f"r{index}", 0]
        roomy.answers = [[*PROMPTS[index], *whole, *[EOS] * 6]]
        bench = roomy.bench("right")
        bench.send(AddRequest("r", list(PROMPTS[index]), WANTED.samplings[index]))
        found = bench.answered()
        assert found.ids["r", 0] == whole
        assert found.reasons["r", 0] is single.reasons[f"r{index}", 0]
        assert found.num_steps < 6 + len(whole) / 2
    roomy.answers = answers


def num_accepted(bench: Bench) -> int:
    assert bench.stats is not None
    return int(bench.stats.counters["spec_decode_num_accepted_tokens_total"])


@pytest.mark.slow_cases
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("index", [1, 3, 5])
def test_forced_tokens_are_accepted(
    roomy: Node, single: Answered, index: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a schema and of a tool call, where nothing was there before that lookup could find."""
    found = {}
    for is_sought in (True, False):
        with monkeypatch.context() as patch:
            if not is_sought:
                patch.setattr(roomy.executor, "take_forced", list)
                roomy.executor._grammars._is_sought = False
            bench = roomy.bench(LOOKUP, mode)
        sampling = msgspec.structs.replace(WANTED.samplings[index], n=1)
        bench.send(AddRequest("r", list(PROMPTS[1]), sampling))
        found[is_sought] = bench.answered(), num_accepted(bench)
    (forced, num_forced), (plain, num_plain) = found[True], found[False]
    expect_same(forced, plain)
    assert num_forced > num_plain
    assert forced.num_steps < plain.num_steps
    if index == 3:
        assert num_plain == 0


@pytest.mark.usefixtures("forced")
def test_an_answer_that_is_continued_has_forced_tokens(roomy: Node, single: Answered) -> None:
    sampling = msgspec.structs.replace(WANTED.samplings[5], n=1)
    bench = roomy.bench()
    bench.send(AddRequest("r", list(PROMPTS[1]), sampling))
    whole = bench.answered().ids["r", 0]
    for num_known in (1, 7, len(whole) // 2):
        bench = roomy.bench(SILENT, "on")
        bench.send(AddRequest("r", list(PROMPTS[1]), sampling, known=(tuple(whole[:num_known]),)))
        assert bench.answered().ids["r", 0] == whole[num_known:]
        assert num_accepted(bench) > 0


@pytest.mark.parametrize(("kind", "mode"), [("mixed", "on"), ("right", "off"), (SILENT, "on")])
def test_preempted_answers(small: Node, single: Answered, kind: str, mode: str) -> None:
    bench = small.bench(kind, mode)
    WANTED.send(bench)
    expect_same(bench.answered(), single)
    assert bench.stats is not None
    assert sum(bench.stats.counters[f"preemptions_{name}_total"] for name in ("recompute", "swap")) > 1


@pytest.mark.parametrize(("kind", "mode"), [("mixed", "on"), ("right", "off")])
def test_draws_that_are_sat_out(
    roomy: Node, single: Answered, kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of their places."""
    sit_out(0.3, monkeypatch)
    bench = roomy.bench(kind, mode)
    WANTED.send(bench)
    expect_same(bench.answered(), single)
    assert bench.stats is not None
    assert bench.stats.counters["draws_sat_out_total"] > 10


def test_drafts_that_come_too_late_end_the_run(roomy: Node, single: Answered, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place without a mask draws nothing, though its drafts are right."""
    monkeypatch.setattr(GrammarMasks, "expect", lambda *_: None)
    bench = roomy.bench("right", "on")
    WANTED.send(bench)
    expect_same(bench.answered(), single)
    assert num_drafts(bench) > 100


def test_masks_that_fail_after_drafts(roomy: Node, single: Answered, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an exception of the copies, or by an error of the place after the first draft."""
    rng = random.Random(4)

    def copy(state: GrammarState) -> GrammarState:
        if rng.random() < 0.3:
            raise RuntimeError("no copy")
        other = GrammarState(state.matcher.deep_copy())
        if rng.random() < 0.3:
            other.advance([0, 0])
        return other

    monkeypatch.setattr(GrammarState, "copy", copy)
    bench = roomy.bench("right", "on")
    WANTED.send(bench)
    expect_same(bench.answered(), single)


def served(node: Node, samplings: Sequence[SamplingParams], answers: Sequence[Sequence[int]] = ()) -> FailingBench:
    """All at once after one prompt. `answers`: what the drafts are made of, right ones and others."""
    drafter = ScriptedDrafter.of([[*PROMPTS[1], *one] for one in answers], "right") if answers else None
    bench = FailingBench(node.executor, node.connector, "on", drafter=drafter)
    for index, sampling in enumerate(samplings):
        bench.send(AddRequest(f"{index}", PROMPTS[1], sampling))
    bench.run()
    return bench


def test_a_dead_end_after_a_draft(roomy: Node) -> None:
    """It ends a request that draws it, where single tokens do, and none that has it in a wrong draft."""
    dead = 'start: "1234" X\nX: /1+/ & /2+/'
    grammar = 'start: "12" (/[56]{9}/ | "3" X)\nX: /1+/ & /2+/'
    samplings = [SamplingParams(max_tokens=12, seed=seed, grammar=one) for seed in range(6) for one in (dead, grammar)]
    plain = served(roomy, samplings)
    assert 6 < len(plain.failed) < 12
    wrong = [[VOCABULARY[one] for one in word] for word in ("123456", "1233")]
    for answers in (wrong, [*plain.tokens.values(), *wrong]):
        found = served(roomy, samplings, answers)
        assert found.tokens == plain.tokens
        assert {name: said.message for name, said in found.failed.items()} == {
            name: said.message for name, said in plain.failed.items()
        }


def test_drafts_that_exhaust_the_lexer_end_no_request(roomy: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has them, at every place of every answer. Some requests have a grammar of their own."""
    hostile = VOCABULARY["1"]
    grammars = [EXHAUSTING.replace("-9", f"-{last}") for last in "887"]
    samplings = [
        SamplingParams(max_tokens=14, seed=seed, temperature=1.5, grammar=grammar, logit_bias={hostile: -100.0})
        for seed, grammar in enumerate(grammars)
    ]
    plain = served(roomy, samplings)
    assert not plain.failed
    assert {*map(len, plain.tokens.values())} == {14}
    restart, begun = Grammars.restart, list[str]()

    def noted(grammars: Grammars, grammar: str, failed: Future[Any]) -> Future[Any]:
        begun.append(grammar)
        return restart(grammars, grammar, failed)

    monkeypatch.setattr(Grammars, "restart", noted)
    behind = [hostile, VOCABULARY["b"]]
    found = served(roomy, samplings, [[*whole[:at], *behind] for at in range(14) for whole in plain.tokens.values()])
    assert begun == [], "drafts have a lexer of their own"
    assert found.failed == {}
    assert found.tokens == plain.tokens


@pytest.mark.parametrize(("kind", "mode"), [("right", "on"), ("mixed", "off"), (SILENT, "on")])
def test_drafts_after_a_handoff(
    roomy: Node, single: Answered, kind: str, mode: str, request: pytest.FixtureRequest
) -> None:
    if kind == SILENT:
        request.getfixturevalue("forced")
    bench = roomy.bench(kind, mode, prefix_caching=False)
    WANTED.hand_over(bench)
    expect_handoff(bench, single, kind)


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_grammar_that_begins_inside_a_draft(roomy: Node, single: Answered, mode: str) -> None:
    """Free text, a special token, and JSON from there on; drafts that reach over it, right ones and others."""
    for index in (0, 4):
        whole, steps = single.ids[f"r{index}", 0], list[int]()
        at = len(whole) // 2
        for prediction in ((), whole, [*whole[:at], 9, 9, *whole[at:]], [*whole[:2], *whole[4:]]):
            bench = roomy.bench(LOOKUP, mode)
            asked = WANTED.samplings[index]
            bench.send(AddRequest("r", list(PROMPTS[index]), asked, prediction=tuple(prediction)))
            found = bench.answered()
            assert found.ids["r", 0] == whole
            assert found.reasons["r", 0] is single.reasons[f"r{index}", 0]
            steps.append(found.num_steps)
        assert steps[1] < 0.8 * steps[0], steps
