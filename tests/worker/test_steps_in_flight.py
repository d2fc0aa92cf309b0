"""Steps launched before the results of those before them are read, replayed by graphs of both kinds and not, in any
order: sequences come, go while a step is under way, and leave their rows to others."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker.cuda_graphs.draw_graphs import VARIANTS
from pd_cluster.worker.cuda_graphs.graph_sizes import decode_sizes
from pd_cluster.worker.pending_step import PendingStep
from pd_connectors.protocol.messages import SampledToken
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import make_executor
from tests.worker.repeated_graphs import near_sizes, with_graphs
from tests.worker.tables import table
from tests.worker.test_step_graphs import cuda_executor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.worker.device_executor import DeviceExecutor

MAX_SEQS, MAX_LEN = 8, 120
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)  # most, for the graphs' own choices count where all are
PARAMS = [
    *[GREEDY] * 20, SamplingParams(max_tokens=99, temperature=0.8, top_k=20, logprobs=1),
    SamplingParams(max_tokens=99, frequency_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(max_tokens=99, temperature=0.0, min_tokens=5),
]  # fmt: skip
MIXED_PARAMS = [
    GREEDY, SamplingParams(max_tokens=99, temperature=1.2), SamplingParams(max_tokens=99, top_k=20),
    SamplingParams(max_tokens=99, top_p=0.8, min_p=0.01), SamplingParams(max_tokens=99, top_k=40, top_p=0.95),
    SamplingParams(max_tokens=99, top_k=5, logprobs=3), SamplingParams(max_tokens=99, temperature=0.0, logprobs=0),
    SamplingParams(max_tokens=99, frequency_penalty=0.9, presence_penalty=-0.3, logit_bias={7: 5.0, 300: -100.0}),
    SamplingParams(max_tokens=99, temperature=0.0, repetition_penalty=1.4, min_tokens=6, stop_token_ids=(7, 9)),
    SamplingParams(max_tokens=99, logit_bias={7: 6.0}, min_tokens=3, stop_token_ids=(7, 8), min_p=0.1),
]  # fmt: skip
MASKED_PARAMS = [
    SamplingParams(max_tokens=99, temperature=temperature, allowed_token_ids=tuple(range(5, 200, step)))
    for temperature, step in ((0.0, 3), (1.0, 7))
]


@dataclass
class Live:
    """A sequence; it has blocks of its own for all its life."""

    start: SequenceStart
    num_samples: int  # of its first step that samples
    num_known: int  # tokens, those under way among them
    num_computed: int = 0


@dataclass
class Walk:
    """Batches in which nothing depends on what is sampled. Of two walks with one seed all are the same."""

    random: random.Random
    free: list[tuple[int, ...]]
    params: Sequence[SamplingParams]
    live: dict[int, Live] = field(default_factory=dict)
    departures: list[int] = field(default_factory=list)
    num_started: int = 0

    @classmethod
    def of(cls, seed: int, block_size: int, params: Sequence[SamplingParams]) -> Walk:
        """Blocks are not given back before all steps that know them have retired: there are many."""
        width = -(-MAX_LEN // block_size)
        blocks = [tuple(range(at * width, (at + 1) * width)) for at in range(3 * MAX_SEQS)]
        return cls(random.Random(seed), blocks, params)

    def batch(self, step: int) -> Batch:
        rng, chunks, starts, departures = self.random, list[SequenceChunk](), list[SequenceStart](), self.departures
        self.departures, budget = [], rng.choice((3, 12, 28, 40))
        while len(self.live) < MAX_SEQS and rng.random() < 0.6:
            starts.append(self._start())
        for seq_id, live in tuple(self.live.items()):
            count = min(live.num_known - live.num_computed, budget, rng.choice((1, 2, 9, 30)))
            if count and (live.num_computed == 0 or rng.random() < 0.85):
                budget -= count
                chunks.append(self._chunk(seq_id, live, count))
            if live.num_known == MAX_LEN or rng.random() < 0.04:
                del self.live[seq_id]
                self.departures.append(seq_id)
                self.free.append(live.start.tables[0].block_ids)
        chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
        return Batch(step, tuple(starts), tuple(chunks), tuple(departures))

    def _start(self) -> SequenceStart:
        rng, seq_id, blocks = self.random, self.num_started, self.free.pop(0)
        length, num_samples = rng.choice((1, 2, 5, 16, 17, 40, 64)), rng.choice((1, 1, 1, 2))
        tokens, params = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)), rng.choice(self.params)
        start = SequenceStart(
            seq_id, tokens, length, table(blocks), params, rng.getrandbits(40), tuple(range(num_samples))
        )
        self.live[seq_id] = Live(start, num_samples, length)
        self.num_started += 1
        return start

    def _chunk(self, seq_id: int, live: Live, count: int) -> SequenceChunk:
        begin, num_samples = live.num_computed, 0
        live.num_computed += count
        if live.num_computed == live.num_known:
            num_samples, live.num_samples = live.num_samples, 1
            live.num_known += 1
        return SequenceChunk(seq_id, begin, count, num_samples=num_samples)


def sampled(
    executor: DeviceExecutor, seed: int, depth: int, num_steps: int, params: Sequence[SamplingParams] = PARAMS
) -> dict[int, list[SampledToken]]:
    """All sequences' tokens when so many steps are under way before the oldest one's result is read."""
    walk, flights = Walk.of(seed, executor.block_size, params), list[PendingStep]()
    found = dict[int, list[SampledToken]]()
    for step in range(num_steps):
        flights.append(executor.launch(walk.batch(step)))
        while flights and (len(flights) == depth or step == num_steps - 1):
            result = flights.pop(0).result()
            for seq_id, tokens in (*result.samples.items(), *result.first_samples.items()):
                found.setdefault(seq_id, []).extend(tokens)
    executor.launch(Batch(num_steps, departures=(*walk.departures, *walk.live))).result()
    return found


@pytest.mark.parametrize("name", ["qwen3", pytest.param("mistral-window", marks=pytest.mark.slow)])
def test_graphs_of_both_kinds_sample_what_steps_as_they_are_do(models: ModelStore, name: str) -> None:
    executor, plain = (make_executor(models.get(name).directory, max_num_seqs=MAX_SEQS) for _ in range(2))
    replayed = with_graphs(executor, [*decode_sizes(6), *near_sizes(28, MAX_SEQS)]).replayed
    found = without_logprobs(sampled(executor, 0, 2, 120))
    assert found == without_logprobs(sampled(plain, 0, 1, 120))
    assert sum(map(len, found.values())) > 250
    num_decodes = sum(not size.num_chunks for size in replayed)
    assert num_decodes > 15
    assert len(replayed) - num_decodes > 60
    executor.close()
    plain.close()


def without_logprobs(found: dict[int, list[SampledToken]]) -> dict[int, list[int]]:
    return {seq_id: [token.token_id for token in tokens] for seq_id, tokens in found.items()}


def test_captured_draws_are_those_of_launches(models: ModelStore) -> None:
    """All kinds of settings in one step. Tables of penalties are counted by graphs and by launches in turn."""
    executor, plain = (make_executor(models.get("qwen3").directory, max_num_seqs=MAX_SEQS) for _ in range(2))
    repeated = with_graphs(executor, [*decode_sizes(6), *near_sizes(28, MAX_SEQS)])
    limits, no_changes, no_logprobs = MIXED_PARAMS[:5], MIXED_PARAMS[:7], MIXED_PARAMS[:5] + MIXED_PARAMS[7:]
    unmasked = (MIXED_PARAMS, limits, no_changes, no_logprobs)
    masked = ([*some, *MASKED_PARAMS] for some in (MIXED_PARAMS[5:], limits, no_changes, no_logprobs))
    for seed, params in enumerate((*unmasked, *masked)):
        found, expected = sampled(executor, seed, 2, 32, params), sampled(plain, seed, 1, 32, params)
        assert without_logprobs(found) == without_logprobs(expected)
        assert sum(map(len, found.values())) > 80
        for seq_id, tokens in expected.items():
            for token, other in zip(tokens, found[seq_id], strict=True):
                assert (token.logprob is None) == (other.logprob is None)
                assert token.logprob == pytest.approx(other.logprob, abs=1e-5)
                assert [one.token_id for one in token.top] == [one.token_id for one in other.top]
    assert {variant: repeated.drawn.count(variant) > 5 for variant in VARIANTS} == dict.fromkeys(VARIANTS, True)
    executor.close()
    plain.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("params", [PARAMS, MIXED_PARAMS, MIXED_PARAMS[:5]], ids=["greedy", "mixed", "limits"])
def test_on_a_gpu_steps_ahead_find_what_they_would_one_by_one(
    models: ModelStore, params: Sequence[SamplingParams]
) -> None:
    """The same graphs in the same order: bit by bit, unless inputs or outputs of one are overwritten by another's.

    Then without graphs of draws.
    """
    executor = cuda_executor(models.get("qwen3").directory, 512)  # one, for each multiplies as it measured
    found = sampled(executor, 0, 2, 600, params)
    assert found == sampled(executor, 0, 1, 600, params)
    assert executor._runner.draws.layout is not None
    executor._runner.draws._graphs.clear()
    assert without_logprobs(found) == without_logprobs(sampled(executor, 0, 2, 600, params))
    executor.close()
