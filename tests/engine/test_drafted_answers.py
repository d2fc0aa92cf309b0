"""An engine with a drafter, with the real worker: its answers, and what they leave, are those without it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_cluster.protocol.messages import (
    AddRequest,
    FinishReason,
    NeedsPrefill,
    TicketOpened,
    TokensOut,
    UseTicket,
    Work,
)
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.drafters import KINDS, ScriptedDrafter
from tests.engine.test_core_pipeline import CONFIG, Bench, make_connector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd_connectors.base import Connector
    from pd_connectors.protocol.messages import SampledToken

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
SAMPLINGS = [SamplingParams(max_tokens=26 + 3 * i, seed=5 + i, **more) for i, more in enumerate(SETTINGS)]
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
Answers = dict[tuple[str, int], list["SampledToken"]]


@dataclass
class Answered:
    """What clients have seen of a run, and what it has left in the cache."""

    answers: Answers
    reasons: dict[tuple[str, int], FinishReason]
    hashes: list[set[bytes]]
    free: int  # in units
    num_steps: int

    @property
    def ids(self) -> dict[tuple[str, int], list[int]]:
        return {key: [token.token_id for token in tokens] for key, tokens in self.answers.items()}


class Told(Bench):
    """A bench that keeps tokens whole, and lets D ask for a prefill of the same node."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.told: Answers = {}
        self.asked: dict[str, AddRequest] = {}  # D-first requests

    def _collect(self) -> None:
        kept = []
        for message in self.mailbox.outbox:
            if isinstance(message, NeedsPrefill) and message.request_id in self.asked:
                asked = self.asked[message.request_id]
                name = f"p{message.request_id[1:]}"
                self.send(msgspec.structs.replace(asked, request_id=name, work=Work.PREFILL))
                continue
            kept.append(message)
            if isinstance(message, TokensOut):
                for part in message.sequences:
                    self.told.setdefault((message.request_id, part.index), []).extend(part.tokens)
        self.mailbox.outbox[:] = kept
        super()._collect()

    def answered(self) -> Answered:
        self.run()
        blocks = self.core._blocks
        blocks.check()
        hashes = [set(pool.cache._by_hash) for pool in blocks.pools]
        return Answered(self.told, self.reasons, hashes, blocks.stats().free, self.core._num_steps)


@dataclass
class Node:
    """One executor, and benches on it. `answers` by prompt: what a drafter knows."""

    executor: DeviceExecutor
    connector: Connector
    answers: list[list[int]] = field(default_factory=list)

    def bench(self, kind: str = "", mode: str = "off", **more: Any) -> Told:
        drafter = ScriptedDrafter.of(self.answers, kind) if kind else None
        return Told(self.executor, self.connector, mode, drafter=drafter, **more)


def node_of(num_blocks: int) -> Iterator[Node]:
    executor = DeviceExecutor.started(
        replace(CONFIG, cache=replace(CONFIG.cache, num_blocks=num_blocks)), lambda _: None
    )
    for connector in make_connector(executor):
        yield Node(executor, connector)
    executor.close()


@pytest.fixture(scope="module")
def roomy() -> Iterator[Node]:
    yield from node_of(96)


@pytest.fixture(scope="module")
def small() -> Iterator[Node]:
    yield from node_of(14)


def send_all(bench: Bench, work: Work = Work.GENERATE, name: str = "r") -> None:
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        bench.send(AddRequest(f"{name}{index}", list(prompt), sampling, work))


@pytest.fixture(scope="module")
def single(roomy: Node, small: Node) -> Answered:
    """Without a drafter."""
    bench = roomy.bench()
    send_all(bench)
    found = bench.answered()
    roomy.answers = small.answers = [[*PROMPTS[int(name[1:])], *ids] for (name, _), ids in found.ids.items()]
    return found


def expect_same(found: Answered, single: Answered, name: str = "r", *, logprobs: bool = True) -> None:
    """Ends, tokens and their log-probabilities."""
    assert found.ids.keys() == {(name + key[1:], index) for key, index in single.ids}
    for (key, index), tokens in single.answers.items():
        own = found.answers[name + key[1:], index]
        assert [token.token_id for token in own] == [token.token_id for token in tokens], key
        assert found.reasons[name + key[1:], index] is single.reasons[key, index]
        for token, other in zip(own, tokens, strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [top.token_id for top in token.top] == [top.token_id for top in other.top]


def num_drafts(bench: Bench) -> int:
    drafting = bench.core._scheduler._planner._drafting
    assert drafting is not None
    drafter = drafting._drafter
    assert isinstance(drafter, ScriptedDrafter)
    return drafter.num_proposed


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_answer_and_leave_no_trace(roomy: Node, single: Answered, kind: str, mode: str) -> None:
    """Seven settings at once, more than there are slots for, beside chunks of prompts."""
    bench = roomy.bench(kind, mode)
    send_all(bench)
    found = bench.answered()
    expect_same(found, single)
    assert num_drafts(bench) > 100
    assert (found.hashes, found.free) == (single.hashes, single.free), "the cache is that of single tokens"
    if mode == "off":
        assert (found.num_steps < 0.9 * single.num_steps) == (kind != "wrong")
    send_all(bench, name="s")  # what is cached is right
    expect_same(Answered({key: tokens for key, tokens in bench.answered().answers.items() if key[0][0] == "s"},
                         bench.reasons, [], 0, 0), single, "s")  # fmt: skip


@pytest.mark.parametrize(("kind", "mode"), [("mixed", "off"), ("mixed", "on"), ("right", "on")])
def test_preempted_answers_with_drafts(small: Node, single: Answered, kind: str, mode: str) -> None:
    bench = small.bench(kind, mode)
    send_all(bench)
    expect_same(bench.answered(), single)
    assert bench.stats is not None
    assert sum(bench.stats.counters[f"preemptions_{name}_total"] for name in ("recompute", "swap")) > 1


@pytest.mark.parametrize(("kind", "mode"), [("right", "on"), ("mixed", "off")])
def test_drafts_behind_a_handoff_that_p_began(roomy: Node, single: Answered, kind: str, mode: str) -> None:
    bench = roomy.bench(kind, mode, prefix_caching=False)

    def take_over(message: TicketOpened) -> None:
        index = int(message.request_id[1:])
        bench.send(AddRequest(f"d{index}", PROMPTS[index], SAMPLINGS[index], Work.TAKE_OVER, message.ticket))

    bench.on_ticket = take_over
    send_all(bench, Work.PREFILL, "p")
    expect_handoff(bench, single)


@pytest.mark.parametrize(("kind", "mode"), [("right", "off"), ("mixed", "on")])
def test_drafts_behind_a_handoff_that_d_began(roomy: Node, single: Answered, kind: str, mode: str) -> None:
    bench = roomy.bench(kind, mode, prefix_caching=False)
    bench.on_ticket = lambda message: bench.send(UseTicket(f"d{message.request_id[1:]}", message.ticket, 60.0))
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        bench.asked[f"d{index}"] = request = AddRequest(f"d{index}", list(prompt), sampling, Work.TAKE_OVER)
        bench.send(request)
    expect_handoff(bench, single)


def expect_handoff(bench: Told, single: Answered) -> None:
    found = bench.answered()
    assert bench.stats is not None
    assert bench.stats.counters["prefills_remote_total"] == len(PROMPTS)
    found.answers = {key: tokens for key, tokens in found.answers.items() if key[0][0] == "d"}
    expect_same(found, single, "d")
    assert num_drafts(bench) > 100


def answer(bench: Told, sampling: SamplingParams, known: Sequence[int] = ()) -> tuple[list[int], FinishReason]:
    bench.send(AddRequest("r", list(PROMPTS[0]), sampling, known=(tuple(known),) if known else ()))
    found = bench.answered()
    return found.ids["r", 0], found.reasons["r", 0]


def test_a_continued_answer_has_drafts(roomy: Node, single: Answered) -> None:
    drawn = msgspec.structs.replace(SAMPLINGS[3], ignore_eos=True)
    whole, _ = answer(roomy.bench(), drawn)
    roomy.answers.append([*PROMPTS[0], *whole])
    for num_known, kind in product((1, 8, 21), KINDS):
        bench = roomy.bench(kind, "on")
        assert answer(bench, drawn, whole[:num_known]) == (whole[num_known:], FinishReason.LENGTH)
        assert num_drafts(bench) > 0
    roomy.answers.pop()


def test_an_answer_ends_inside_a_run(roomy: Node, single: Answered) -> None:
    """By its length, by a stop token, by the end of the context, in every place of a run."""
    whole, _ = answer(roomy.bench(), GREEDY)
    roomy.answers.insert(0, [*PROMPTS[0], *whole, *[7] * 9])
    ends = sorted({whole.index(token) for token in whole[5:]})
    places = Counter[int]()
    for end in ends:
        bench = roomy.bench("right")
        asked = msgspec.structs.replace(GREEDY, stop_token_ids=(whole[end],))
        assert answer(bench, asked) == (whole[: end + 1], FinishReason.STOP)
        places[end % 6] += 1
    assert len(places) > 2
    for num_tokens in range(20, 27):
        for kind in ("right", "mixed"):
            asked = msgspec.structs.replace(GREEDY, max_tokens=num_tokens)
            assert answer(roomy.bench(kind), asked) == (whole[:num_tokens], FinishReason.LENGTH)
        bench = roomy.bench("right", "on")
        bench.core._scheduler._max_model_len = len(PROMPTS[0]) + num_tokens
        assert answer(bench, GREEDY) == (whole[:num_tokens], FinishReason.LENGTH)
    del roomy.answers[0]
