"""Steps with drafts give the tokens of single steps, whatever the drafts are, and leave what these leave."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes, decode_sizes, draft_sizes
from pd_cluster.worker.logits_stages.penalties import Penalties
from pd_cluster.worker.sampling_state import SamplingState
from tests.drafters import KINDS, bent
from tests.worker.conftest import VOCAB_SIZE
from tests.worker.driver import Driver, Generation, make_executor, random_prompts
from tests.worker.repeated_graphs import near_sizes, with_graphs
from tests.worker.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pd_cluster.worker.device_executor import DeviceExecutor
    from pd_connectors.protocol.messages import SampledToken
    from tests.worker.conftest import ModelStore

    Single = tuple[list[list[SampledToken]], list[torch.Tensor]]

NUM_TOKENS, MOST, MAX_SEQS = 14, 4, 12
SIZES = [*decode_sizes(8), *draft_sizes(2 * MAX_SEQS, MAX_SEQS), *near_sizes(64, MAX_SEQS)]
PROMPTS = random_prompts((20, 5, 33, 15, 9, 70, 3, 12), VOCAB_SIZE, 3)
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "temperature": 1.2},
    {"temperature": 0.0, "logprobs": 5},
    {"logit_bias": {7: 4.0, 9: 4.0}, "min_tokens": 6, "stop_token_ids": (7,), "bad_words": ((9,), (7, 7))},
    {"temperature": 0.0, "frequency_penalty": 0.9},
    {"allowed_token_ids": tuple(range(0, VOCAB_SIZE, 3))},
]
SAMPLINGS = [SamplingParams(max_tokens=NUM_TOKENS, **params) for params in PARAMS]


@dataclass
class DraftDriver:
    """Steps of a Driver in which decodes have drafts. `answers`: by sequence, what these are made of; () for none."""

    driver: Driver
    kind: str
    answers: Sequence[Sequence[int]] = ()
    num_drafts: int = 0
    num_accepted: int = 0
    num_steps: int = 0

    def run(self) -> list[list[SampledToken]]:
        driver = self.driver
        while live := [one for one in driver.sequences if not one.done]:
            starts, chunks, left = [], [], 24  # prompts are in chunks, beside decodes
            for one in live:
                remaining = len(one.all_ids) - one.computed
                count = min(remaining, left)
                if not count:
                    continue
                left -= count if remaining > 1 else 0
                if not one.started:
                    starts.append(driver._start(one))
                chunks.append(self._chunk(one, count, remaining))
                one.computed += count
            chunks.sort(key=lambda chunk: (chunk.num_tokens > 1, not chunk.is_decode))
            batch = Batch(driver.steps, tuple(starts), tuple(chunks), tuple(driver._departures))
            driver._departures = []
            driver.steps += 1
            for seq_id, tokens in driver.executor.launch(batch).result().samples.items():
                one = driver.sequences[seq_id]
                one.tokens.extend(tokens)
                one.computed += len(tokens) - 1
                self.num_accepted += len(tokens) - 1
            self.num_steps += 1
        return [one.tokens for one in driver.sequences]

    def leave(self) -> None:
        self.driver._departures = [one.seq_id for one in self.driver.sequences]
        self.driver.leave()

    def _chunk(self, one: Generation, count: int, remaining: int) -> SequenceChunk:
        drafts: tuple[int, ...] = ()
        if remaining == 1 and self.answers:
            known = len(one.tokens)
            most = min(1 + (known + one.seq_id) % MOST, NUM_TOKENS - known - 1)
            drafts = bent(self.answers[one.seq_id][known : known + most], self.kind, known)
        self.num_drafts += len(drafts)
        chunk = self.driver._chunk(one, count + len(drafts), int(count == remaining))
        return msgspec.structs.replace(chunk, drafts=drafts)


def penalty_tables(executor: DeviceExecutor, seq_ids: Sequence[int] = (3, 6)) -> list[torch.Tensor]:
    """The rows of the tables that these sequences, which have penalties, have left."""
    rows = executor._runner.rows
    tables = next(stage for stage, _ in rows._sampling._stages if isinstance(stage, Penalties)).tables()
    at = [rows._row_of[seq_id] for seq_id in seq_ids]
    return [tables.seen[at], tables.counts[at]]


def driven(
    executor: DeviceExecutor, kind: str, answers: Sequence[Sequence[int]], seed: int = 1,
    chosen: Sequence[int] = range(len(PARAMS)),
) -> DraftDriver:  # fmt: skip
    driver = Driver(executor, seed=seed)
    for index in chosen:
        driver.add(PROMPTS[index], SAMPLINGS[index], seed=100 + index)
    return DraftDriver(driver, kind, [answers[index] for index in chosen] if answers else ())


@pytest.fixture(scope="module")
def executor(models: ModelStore) -> Iterator[DeviceExecutor]:
    executor = make_executor(models.get("qwen3").directory, max_num_seqs=MAX_SEQS, speculation="lookup")
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def single(executor: DeviceExecutor) -> Single:
    """The answers of single steps, and the tables of penalties after them."""
    drive = driven(executor, "right", ())
    tokens, tables = drive.run(), penalty_tables(executor)
    drive.leave()
    return tokens, tables


def expect_single(found: list[list[SampledToken]], single: Single, tables: list[torch.Tensor]) -> None:
    expected, expected_tables = single
    assert ids_of(found) == ids_of(expected)
    for token, other in zip(chain(*found), chain(*expected), strict=True):
        assert token.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [top.token_id for top in token.top] == [top.token_id for top in other.top]
    for own, others in zip(tables, expected_tables, strict=True):
        assert torch.equal(own, others), "a draft is counted, or a token of a run is not"


def ids_of(tokens: Iterable[Sequence[SampledToken]]) -> list[list[int]]:
    return [[token.token_id for token in one] for one in tokens]


@pytest.mark.slow_cases
@pytest.mark.parametrize("has_graphs", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(executor: DeviceExecutor, single: Single, kind: str, *, has_graphs: bool) -> None:
    """Eight settings in one step, beside chunks of prompts."""
    executor._graph_sizes = GraphSizes(())
    replayed = with_graphs(executor, SIZES).replayed if has_graphs else []
    drive = driven(executor, kind, ids_of(single[0]), seed=2)
    expect_single(drive.run(), single, penalty_tables(executor))
    drive.leave()
    assert drive.num_drafts > 40
    if kind == "right":
        assert drive.num_accepted == drive.num_drafts
        assert drive.num_steps < NUM_TOKENS
    elif kind == "wrong":
        assert drive.num_accepted == 0
    else:
        assert 20 < drive.num_accepted < drive.num_drafts
    if has_graphs:
        kinds = Counter((size.num_chunks > 0, size.has_drafts) for size in replayed)
        assert kinds[True, False] > 2, "beside prompts"
        assert kinds[False, True] > 2, "alone"
        assert max(size.num_rows for size in replayed) > MAX_SEQS, "draws have more rows than there are sequences"


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", [(0, 1), (0, 1, 2, 4), (0, 7), (0, 3)], ids=["plain", "limits", "masks", "changed"])
def test_graphs_draw_after_drafts(executor: DeviceExecutor, single: Single, kind: str, chosen: tuple[int, ...]) -> None:
    """By the graph of the step, by one after it, or by launches where a stage reads tokens."""
    repeated = with_graphs(executor, SIZES)
    drive = driven(executor, kind, ids_of(single[0]), chosen=chosen)
    found = drive.run()
    drive.leave()
    assert ids_of(found) == [ids_of(single[0])[index] for index in chosen]
    assert drive.num_drafts > 10
    assert len(repeated.replayed) == drive.num_steps, "each step has a graph"
    assert chosen != (0, 1) or not repeated.drawn
    assert chosen != (0, 1, 2, 4) or len(repeated.drawn) > 3
    assert chosen != (0, 7) or any(variant.has_masks for variant in repeated.drawn)


@pytest.mark.parametrize("chosen", [(0, 1), (0, 3), (0, 1, 2, 4)], ids=["plain", "changed", "limits"])
def test_late_rows_of_graphs_are_drawn_by_launches_too(
    executor: DeviceExecutor, single: Single, chosen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a step may wait for a mask. Their draw tells the rows what they go on with."""
    with_graphs(executor, SIZES)
    monkeypatch.setattr(SamplingState, "are_late", lambda _, rows: np.ones(len(rows), bool))
    drive = driven(executor, "right", ids_of(single[0]), chosen=chosen)
    found = drive.run()
    drive.leave()
    assert ids_of(found) == [ids_of(single[0])[index] for index in chosen]
    assert drive.num_accepted > 10


def test_drafts_follow_a_token_that_is_on_the_device_only(executor: DeviceExecutor, single: Single) -> None:
    """Beside a sequence without drafts, and a prompt with three first tokens, launched and replayed."""
    expected = ids_of(single[0])
    for sizes in ((), SIZES):
        executor._graph_sizes = GraphSizes(())
        if sizes:
            with_graphs(executor, sizes)
        plain, drafted, lead = (
            SequenceStart(
                at, tuple(PROMPTS[at]), len(PROMPTS[at]), table(range(8 * at, 8 * at + 8)), SAMPLINGS[at], 100 + at
            )
            for at in (1, 3, 2)
        )  # fmt: skip
        lead = msgspec.structs.replace(lead, num_sample_seeds=(102, 5, 102))
        length, other = len(drafted.token_ids), len(plain.token_ids)
        answer = expected[3]
        drafts = (*answer[2:4], answer[4] ^ 1)
        leads = (SequenceChunk(2, 0, len(lead.token_ids), num_samples=3),) if not sizes else ()
        first, second, third, fourth = (
            executor.launch(batch)
            for batch in (
                Batch(0, (plain, drafted), (SequenceChunk(1, 0, other, (), 1), SequenceChunk(3, 0, length, (), 1))),
                Batch(1, (), (SequenceChunk(3, length, 1, (), 1),)),
                Batch(2, (lead,), (
                    SequenceChunk(1, other, 1, (), 1), SequenceChunk(3, length + 1, 4, (), 1, False, drafts), *leads,
                )),
                Batch(3, (), (SequenceChunk(1, other + 1, 1, (), 1),)),
            )
        )  # fmt: skip
        assert ids_of(first.result().samples.values()) == [expected[1][:1], answer[:1]]
        assert ids_of(second.result().samples.values()) == [answer[1:2]]
        result = third.result()
        assert ids_of([result.samples[1], result.samples[3]]) == [expected[1][1:2], answer[2:5]]
        if leads:
            one, another, again = (token.token_id for token in result.first_samples[2])
            assert (one, again) == (expected[2][0],) * 2
            assert another != one
        assert ids_of([fourth.result().samples[1]]) == [expected[1][2:3]]
        last = executor.launch(Batch(4, (), (SequenceChunk(3, length + 4, 1, (), 1),))).result()
        assert ids_of([last.samples[3]]) == [answer[5:6]], "the run is on the host, and counted"
        executor.launch(Batch(5, departures=(1, 3, 2))).result()
