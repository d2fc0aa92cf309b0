"""An engine with a drafter, with the real worker: its answers, and what they leave, are those without it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_cluster.drafting.lookup_drafter import LookupDrafter
from pd_cluster.engine.core import EngineCore
from pd_cluster.protocol.messages import Abort, AddRequest, FinishReason, UseTicket, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.drafts import Speculation
from tests.drafters import KINDS
from tests.engine.drafting_node import (
    LOOKUP,
    Answered,
    Node,
    Told,
    Wanted,
    expect_handoff,
    expect_same,
    num_drafts,
    roomy,
    small,
)
from tests.engine.test_core_pipeline import CONFIG, FakeMailbox

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["roomy", "small"]

PROMPTS = [[(7 * i + j * j) % 200 + 5 for j in range(length)] for i, length in enumerate((60, 3, 33, 17, 80, 16, 31))]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8},
    {"top_k": 20, "top_p": 0.9, "ignore_eos": True},
    {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.2, "temperature": 1.2},
    {"temperature": 0.0, "logprobs": 2},
    {"bad_words": ((9,), (40, 41)), "logit_bias": {40: 3.0}, "temperature": 0.9},
    {"min_tokens": 20, "n": 3, "temperature": 1.1},
]
WANTED = Wanted(PROMPTS, [SamplingParams(max_tokens=26 + 3 * i, seed=5 + i, **more) for i, more in enumerate(SETTINGS)])
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def single(roomy: Node, small: Node) -> Answered:
    """Without a drafter."""
    return WANTED.answered(roomy, small)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("right", "off"), ("wrong", "off"), ("mixed", "on"), (LOOKUP, "on")],  # others: preempted, after handoffs
)
def test_drafts_change_no_answer_and_leave_no_trace(roomy: Node, single: Answered, kind: str, mode: str) -> None:
    """Seven settings at once, more than there are slots for, beside chunks of prompts."""
    bench = roomy.bench(kind, mode)
    WANTED.send(bench)
    found = bench.answered()
    expect_same(found, single)
    assert num_drafts(bench) > (0 if kind == LOOKUP else 30)  # how many are worth it follows from the machine's times
    assert (found.hashes, found.free) == (single.hashes, single.free), "the cache is that of single tokens"
    if mode == "off" and kind in KINDS:
        assert (found.num_steps < 0.9 * single.num_steps) == (kind != "wrong")
    WANTED.send(bench, name="s")  # what is cached is right
    expect_same(Answered({key: tokens for key, tokens in bench.answered().answers.items() if key[0][0] == "s"},
                         bench.reasons, [], 0, 0), single, "s")  # fmt: skip


@pytest.mark.parametrize(("kind", "mode"), [("mixed", "off"), ("mixed", "on"), ("right", "on"), (LOOKUP, "off")])
def test_preempted_answers_with_drafts(small: Node, single: Answered, kind: str, mode: str) -> None:
    bench = small.bench(kind, mode)
    WANTED.send(bench)
    expect_same(bench.answered(), single)
    assert bench.stats is not None
    assert sum(bench.stats.counters[f"preemptions_{name}_total"] for name in ("recompute", "swap")) > 1


@pytest.mark.parametrize(("kind", "mode"), [("right", "on"), ("mixed", "off"), (LOOKUP, "on")])
def test_drafts_after_a_handoff_that_p_began(roomy: Node, single: Answered, kind: str, mode: str) -> None:
    bench = roomy.bench(kind, mode, prefix_caching=False)
    WANTED.hand_over(bench)
    expect_handoff(bench, single, kind)


@pytest.mark.parametrize(("kind", "mode"), [("right", "off"), ("mixed", "on"), (LOOKUP, "off")])
def test_drafts_after_a_handoff_that_d_began(roomy: Node, single: Answered, kind: str, mode: str) -> None:
    bench = roomy.bench(kind, mode, prefix_caching=False)
    bench.on_ticket = lambda message: bench.send(UseTicket(f"d{message.request_id[1:]}", message.ticket, 60.0))
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, WANTED.samplings, strict=True)):
        bench.asked[f"d{index}"] = request = AddRequest(f"d{index}", list(prompt), sampling, Work.TAKE_OVER)
        bench.send(request)
    expect_handoff(bench, single, kind)


def answer(
    bench: Told, sampling: SamplingParams, known: Sequence[int] = (), prediction: Sequence[int] = ()
) -> tuple[list[int], FinishReason]:
    given = (tuple(known),) if known else ()
    bench.send(AddRequest("r", list(PROMPTS[0]), sampling, known=given, prediction=tuple(prediction)))
    found = bench.answered()
    return found.ids["r", 0], found.reasons["r", 0]


def test_a_continued_answer_has_drafts(roomy: Node, single: Answered) -> None:
    drawn = msgspec.structs.replace(WANTED.samplings[3], ignore_eos=True)
    whole, _ = answer(roomy.bench(), drawn)
    roomy.answers.append([*PROMPTS[0], *whole])
    for num_known, kind in product((1, 15), ("right", "mixed", LOOKUP)):
        bench = roomy.bench(kind, "on")
        assert answer(bench, drawn, whole[:num_known], whole) == (whole[num_known:], FinishReason.LENGTH)
        assert num_drafts(bench) > 0
    roomy.answers.pop()


def test_an_answer_ends_inside_a_run(roomy: Node, single: Answered) -> None:
    """By its length, by a stop token, by the end of the context, in every place of a run."""
    whole, _ = answer(roomy.bench(), GREEDY)
    roomy.answers.insert(0, [*PROMPTS[0], *whole, *[7] * 9])
    ends = sorted({whole.index(token) for token in whole[5:]})[:14]  # a right run has at most seven
    places = Counter[int]()
    for end in ends:
        asked = msgspec.structs.replace(GREEDY, stop_token_ids=(whole[end],))
        for kind in ("right", LOOKUP):
            assert answer(roomy.bench(kind), asked, (), whole) == (whole[: end + 1], FinishReason.STOP)
        places[end % 7] += 1
    assert len(places) > 2
    for num_tokens in range(20, 27):
        for kind in ("right", LOOKUP):
            asked = msgspec.structs.replace(GREEDY, max_tokens=num_tokens)
            assert answer(roomy.bench(kind), asked, (), whole) == (whole[:num_tokens], FinishReason.LENGTH)
        bench = roomy.bench("right", "on")
        bench.core._scheduler._arrivals.max_model_len = len(PROMPTS[0]) + num_tokens
        assert answer(bench, GREEDY) == (whole[:num_tokens], FinishReason.LENGTH)
    del roomy.answers[0]


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_prediction_makes_answers_shorter_in_steps_and_changes_none(roomy: Node, single: Answered, mode: str) -> None:
    """Right ones, and those of other requests."""
    answers = [single.ids[f"r{index}", 0] for index in range(len(PROMPTS))]
    for shift, is_right in ((0, True), (1, False)):
        bench = roomy.bench(LOOKUP, mode)
        for index, (prompt, sampling) in enumerate(zip(PROMPTS, WANTED.samplings, strict=True)):
            prediction = tuple(answers[(index + shift) % len(answers)])
            bench.send(AddRequest(f"r{index}", list(prompt), sampling, prediction=prediction))
        found = bench.answered()
        expect_same(found, single)
        if is_right:
            assert found.num_steps < 0.9 * single.num_steps  # a step has 6 drafts of all sequences


def test_the_config_names_the_drafter(roomy: Node, caplog: pytest.LogCaptureFixture) -> None:
    def core_of(**more: Any) -> EngineCore:
        config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, speculation="lookup", max_drafts=3))
        return EngineCore(replace(config, **more), roomy.executor, roomy.connector, FakeMailbox())

    drafting = core_of()._scheduler._drafting
    assert drafting is not None
    assert isinstance(drafting._drafter, LookupDrafter)
    assert drafting._most == 3
    assert roomy.bench().core._scheduler._drafting is None, "by default there is none"
    assert core_of(model=replace(CONFIG.model, logits_stages=("a:B",)))._scheduler._drafting is None
    assert "nothing is drafted: --logits-stage" in caplog.text


def test_the_device_bounds_rows_of_drafts_where_steps_are_captured(
    roomy: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def most_rows(*, cuda_graphs: bool) -> int | None:
        limits = replace(CONFIG.scheduler, speculation="lookup", cuda_graphs=cuda_graphs, max_graph_batch=3)
        config = replace(CONFIG, scheduler=limits)
        drafting = EngineCore(config, roomy.executor, roomy.connector, FakeMailbox())._scheduler._drafting
        assert drafting is not None
        return drafting._costs.most_rows

    assert most_rows(cuda_graphs=True) is None, "a CPU launches all steps"
    monkeypatch.setattr(roomy.executor, "model", replace(roomy.executor.model, device="cuda:0"))
    assert most_rows(cuda_graphs=True) == CONFIG.scheduler.max_num_seqs + 3
    assert most_rows(cuda_graphs=False) is None


def test_an_engine_that_is_done_keeps_nothing_of_what_it_drafted(roomy: Node) -> None:
    """Whether answers ended, were aborted, or were handed over; with the thread of the product."""
    bench = Told(roomy.executor, roomy.connector, "on", drafter=LookupDrafter())
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, WANTED.samplings, strict=True)):
        bench.send(AddRequest(f"r{index}", list(prompt), sampling, prediction=(5, 6, 7)))
    for index in (1, 4, 6):
        bench.send(Abort(f"r{index}"))
    WANTED.hand_over(bench)
    bench.run()  # which ends with `Scheduler.check`
    drafting = bench.core._scheduler._drafting
    assert drafting is not None
    drafting.check()


@pytest.mark.parametrize("mode", ["off", "on"])
def test_answers_with_prices_and_indexes_of_this_machine(roomy: Node, single: Answered, mode: str) -> None:
    """As in use: how many drafts a step has depends on its speed, and no token does."""
    bench = Told(roomy.executor, roomy.connector, mode, drafter=LookupDrafter())
    core, drafting = bench.core, bench.core._scheduler._drafting
    assert drafting is not None
    drafting._costs = Speculation(drafting._drafter, core._step_model, lambda: core._pipeline.gap_s)
    for name in ("q", "r"):
        WANTED.send(bench, name=name)
    found = bench.answered()
    for name in ("q", "r"):
        own = {key: tokens for key, tokens in found.answers.items() if key[0][0] == name}
        expect_same(Answered(own, bench.reasons, [], 0, 0), single, name)
