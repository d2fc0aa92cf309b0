"""Executors of several ranks draw the tokens of one rank, with two steps under way, whatever requests ask for."""

from __future__ import annotations

import os
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, BlockCopies, SequenceChunk, SequenceStart, StepResult
from pd_cluster.worker import step_measurement
from pd_cluster.worker.capacity import SAMPLES_PER_SEQ
from pd_cluster.worker.device_executor import DeviceCached, DeviceDescribed, DeviceExecutor, run_phases
from pd_cluster.worker.memory_measurement import run_largest_step
from pd_cluster.worker.pending_step import PendingStep
from pd_cluster.worker.rank_frames import RankLost
from pd_cluster.worker.rank_link import StepOnRanks
from pd_cluster.worker.ranks import Ranks
from pd_cluster.worker.warm_up import ASKING, DRAWN, GREEDY
from pd_connectors.protocol.layout import BlockLayout
from tests.drafters import KINDS
from tests.engine.drafting_node import SILENT, Node, expect_same, num_drafts
from tests.engine.test_core_pipeline import make_connector
from tests.engine.test_drafted_grammars import WANTED as GRAMMARS
from tests.patient_masks import be_patient
from tests.shallow_model import shallow_model
from tests.worker.driver import random_prompts
from tests.worker.forked_ranks import forked_ranks
from tests.worker.reads import read_prompt
from tests.worker.tables import slabs_of, table
from tests.worker.test_drafted_steps import driven, ids_of
from tests.worker.test_side_copies import run_tier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd_cluster.errors import PdError
    from pd_cluster.worker.executor import Executor, Pending
    from pd_cluster.worker.rank_link import RankLink
    from pd_connectors.protocol.messages import SampledToken

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 8
BLOCK_SIZE = 16
WORDS = "start: /[a-z ]+/"


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, **fields)


PLAIN = [params(temperature=0.0), params(temperature=0.9), params(temperature=1.5)]
GATHERED = [
    params(temperature=0.8, top_k=20), params(temperature=0.0, logprobs=3), params(temperature=0.0, min_tokens=5),
    params(temperature=1.1, min_p=0.05, logit_bias={9: 4.0}), params(frequency_penalty=0.9, repetition_penalty=1.2),
    params(temperature=0.7, logits_args={"ban": 17}), params(allowed_token_ids=tuple(range(5, 900))),
]  # fmt: skip
LATE = [params(temperature=0.0, grammar=WORDS), params(temperature=0.8, grammar=WORDS, logprobs=1)]


@dataclass
class Run:
    """One sequence, as far as its steps were launched."""

    prompt: list[int]
    params: SamplingParams
    blocks: list[int]
    begins: int = 0  # the step in which it starts
    computed: int = 0
    tokens: list[SampledToken] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.computed >= len(self.prompt) + NUM_TOKENS - 1


class OverlappedDriver:
    """Launches a step before the result of the one before it is read. Chunks of at most 48 tokens."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.under_way: deque[tuple[Pending, set[int]]] = deque()
        self.num_steps = self.num_absent = 0

    def retire(self) -> StepResult:
        pending, _ = self.under_way.popleft()
        return pending.result()

    def launch(self, **parts: Any) -> None:
        self.under_way.append((self.executor.launch(Batch(self.num_steps, **parts), 60.0), set()))
        self.num_steps += 1

    def run(self, sequences: Sequence[Run]) -> list[list[SampledToken]]:
        gone: set[int] = set()
        while len(gone) < len(sequences) or self.under_way:
            if self.under_way:  # known before the next step is planned
                self.executor.draw_late()
                newest = self.under_way[-1][0].absent
                self.num_absent += len(newest)
                for seq_id in newest:
                    sequences[seq_id].computed -= 1  # its last token is computed again
            done = [i for i, one in enumerate(sequences) if one.is_done and i not in gone]
            starts: list[SequenceStart] = []
            decodes: list[SequenceChunk] = []
            chunks: list[SequenceChunk] = []
            for i, one in enumerate(sequences):
                if one.begins > self.num_steps or one.is_done:
                    continue
                if not one.computed:
                    starts.append(
                        SequenceStart(
                            i, tuple(one.prompt), len(one.prompt), table(tuple(one.blocks)), one.params, 41 + i
                        )
                    )
                count = min(48, max(1, len(one.prompt) - one.computed))
                samples = int(one.computed + count >= len(one.prompt))
                (decodes if count == 1 else chunks).append(SequenceChunk(i, one.computed, count, num_samples=samples))
                one.computed += count
            if decodes or chunks or done:
                self.launch(starts=tuple(starts), chunks=(*decodes, *chunks), departures=tuple(done))
                gone.update(done)
            if len(self.under_way) > 1 or not (decodes or chunks or done):
                for seq_id, tokens in self.retire().samples.items():
                    sequences[seq_id].tokens += tokens
        return [one.tokens for one in sequences]


def make_sequences(wanted: Sequence[SamplingParams], seed: int = 0) -> list[Run]:
    """Prompts of 1 to 130 tokens with blocks in no order, some of which begin later."""
    prompts = random_prompts([(i * 53 + 7) % 130 + 1 for i in range(len(wanted))], 3000, seed)
    count = 10 * len(wanted)
    blocks = iter([i * 7919 % count for i in range(count)])
    return [
        Run(prompt, one, [next(blocks) for _ in range(10)], begins=i % 4)
        for i, (prompt, one) in enumerate(zip(prompts, wanted, strict=True))
    ]


def make_config(tp: int, **model: Any) -> NodeConfig:
    return NodeConfig(
        model=ModelConfig(
            model=shallow_model(),
            device="cpu",
            dtype="float32",
            tp=tp,
            num_threads=1,
            logits_stages=("tests.ban_token:BanToken",),
            **model,
        ),
        cache=CacheConfig(kv_cache_gb=0.04, block_size=BLOCK_SIZE, swap_gb=0.002, host_cache_gb=0.005),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
    )


@pytest.fixture(scope="module")
def one() -> Iterator[DeviceExecutor]:
    executor = DeviceExecutor.started(make_config(1), lambda _: None)
    yield executor
    executor.close()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceExecutor]:
    losses: list[PdError] = []
    config = make_config(request.param)
    with pytest.MonkeyPatch.context() as patch, forked_ranks():  # a rank imports the stage's class, not from its folder
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        ranks = Ranks(config, f"ipc://{tmp_path_factory.mktemp('r')}/r", losses.append)
        executor = run_phases(DeviceDescribed.over(ranks, lambda _: None), config.cache, lambda _: None)
    yield executor
    executor.close()
    executor.close()
    assert losses == []
    assert [process.returncode for process in ranks.link._processes.values()] == [0] * (request.param - 1)


@pytest.mark.integration
@pytest.mark.parametrize(
    "wanted", [PLAIN * 2, PLAIN + GATHERED, PLAIN + GATHERED[:2] + LATE], ids=["plain", "asking", "late"]
)
def test_equal_tokens(one: DeviceExecutor, several: DeviceExecutor, wanted: list[SamplingParams]) -> None:
    """Every rank also draws the same ids, or a step's result would raise RankLost."""
    expected: list[list[SampledToken]] = []
    found: list[list[SampledToken]] = []
    for executor, drawn in ((one, expected), (several, found)):
        for sampling in wanted:
            executor.check(sampling)
        drawn += OverlappedDriver(executor).run(make_sequences(wanted))
    for theirs, ours, asked in zip(expected, found, wanted, strict=True):
        assert len(ours) == NUM_TOKENS
        assert [token.token_id for token in ours] == [token.token_id for token in theirs], asked
        for their, our in zip(theirs, ours, strict=True):
            assert (our.logprob is None) == (asked.logprobs is None)
            assert our.logprob == pytest.approx(their.logprob, abs=1e-3)
            assert len(our.top) == len(their.top)


@pytest.mark.integration
def test_prompts_are_read_over_ranks(one: DeviceExecutor, several: DeviceExecutor) -> None:
    (prompt,) = random_prompts([70], 3000, seed=6)
    (theirs, last), (ours, own_last) = read_prompt(one, prompt), read_prompt(several, prompt)
    assert [entry.token_id for entry in ours] == prompt[1:]
    assert [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in theirs], abs=1e-3)
    assert own_last.logits == pytest.approx(last.logits, abs=1e-2)
    assert len(own_last.pooled) == len(last.pooled) == 4 * one.model.spec.hidden_size


@pytest.mark.integration
def test_every_rank_copies_blocks(one: DeviceExecutor, several: DeviceExecutor) -> None:
    """n = 2, a copy of the last block, preemption to host memory and back into other blocks."""
    assert run_copies(several) == run_copies(one)


def run_copies(executor: Executor) -> list[list[int]]:
    (prompt,) = random_prompts([41], 3000, seed=3)
    driver, sampling = OverlappedDriver(executor), params(temperature=0.8)
    start = SequenceStart(0, tuple(prompt), 41, table((5, 2, 9)), sampling, 7, (7, 8))
    driver.launch(starts=(start,), chunks=(SequenceChunk(0, 0, 41, num_samples=2),))
    firsts = [token.token_id for token in driver.retire().first_samples[0]]
    second = SequenceStart(1, (*prompt, firsts[1]), 41, table((5, 2, 11)), sampling, 8)
    tokens = {0: [firsts[0]], 1: [firsts[1]]}

    def decode(seq_ids: Sequence[int], **parts: Any) -> None:
        chunks = tuple(SequenceChunk(i, 40 + len(tokens[i]), 1, num_samples=1) for i in seq_ids)
        driver.launch(chunks=chunks, **parts)
        for seq_id, drawn in driver.retire().samples.items():
            tokens[seq_id] += [token.token_id for token in drawn]

    decode([0, 1], starts=(second,), copies=BlockCopies(copy_on_write=((0, 9, 11),)))
    decode([0, 1])
    decode([1], departures=(0,), copies=BlockCopies(swap_out=((0, 5, 3), (0, 2, 0), (0, 9, 1))))
    # Its blocks are overwritten by a sequence of other tokens
    other = tuple(random_prompts([48], 3000, seed=4)[0])
    driver.launch(
        starts=(SequenceStart(2, other, 48, table((5, 2, 9)), sampling, 1),), chunks=(SequenceChunk(2, 0, 48),)
    )
    driver.retire()
    back = SequenceStart(0, (*prompt, *tokens[0]), 41, table((14, 12, 13)), sampling, 7)
    decode([0], starts=(back,), copies=BlockCopies(swap_in=((0, 3, 14), (0, 0, 12), (0, 1, 13))), departures=(2,))
    decode([0])
    driver.launch(departures=(0, 1))
    driver.retire()
    return [tokens[0], tokens[1]]


@pytest.mark.integration
def test_ranks_agree_on_the_cache(one: DeviceExecutor, several: DeviceExecutor) -> None:
    size = several.config.model.tp
    assert several.layout.groups == one.layout.groups
    assert several.layout.tp_size == size
    assert several.slabs.num_blocks(0) // one.slabs.num_blocks(0) == size  # --kv-cache-gb is for each rank
    (tensor,) = several.cache.tensors
    assert tensor.shape == (several.slabs.num_blocks(0), 4 // size, *one.cache.tensors[0].shape[2:])
    assert several.model.fingerprint == one.model.fingerprint


def test_other_tokens_of_a_rank_end_the_engine() -> None:
    class Link:
        def take_retired(self) -> dict[int, int]:
            return {1: 11, 2: 12}

    with pytest.raises(RankLost, match="rank 2 has drawn other tokens than rank 0 in its step 4"):
        StepOnRanks(cast("RankLink", Link()), 4).confirm(11)


def test_a_measurement_that_fails_on_rank_0_ends_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other ranks may wait in the sums of its step: with default sizes, the next phase would never end."""

    def fail(*_: object) -> None:
        raise RuntimeError("a kernel failed")

    ranks = Ranks(make_config(2), f"ipc://{tmp_path}/r", lambda _: None)
    executor = stub_executor(ranks, SimpleNamespace())
    monkeypatch.setattr(ranks.link, "blamed", nullcontext)
    monkeypatch.setattr(ranks, "phase", lambda *_: nullcontext([]))
    monkeypatch.setattr(DeviceCached, "capture", lambda _: executor)
    monkeypatch.setattr(step_measurement, "limit_of_prompts", fail)
    cached = DeviceCached(executor._plan, executor._weights, cast("Any", None), executor.model)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        cached.warm_up()
    assert ranks.has_failed


def stub_executor(ranks: Ranks, runner: SimpleNamespace) -> DeviceExecutor:
    """That of rank 0 after its start on a GPU."""
    stub = SimpleNamespace(
        device="cuda",
        max_model_len=64,
        vocab_size=100,
        slabs=slabs_of(9),
        block_size=16,
        num_host_blocks=0,
        sizes=(),
        describe=lambda: None,
        ranks=ranks,
        memory=torch.empty(0, dtype=torch.uint8),
    )
    plan = SimpleNamespace(
        device=torch.device("cuda"), is_budget_measured=True, most_drafts=0, place=stub, config=make_config(2),
        layout=stub, grammars=None, owned=None, progress=None, profiler=SimpleNamespace(start=None, stop=None),
    )  # fmt: skip
    weights = SimpleNamespace(model=None, owned=None, adapters=None)
    runner.cache = runner.graphs = stub
    return DeviceExecutor(cast("Any", plan), cast("Any", weights), cast("Any", runner), cast("Any", stub))


def test_a_late_draw_that_fails_after_a_result_ends_the_ranks_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At depth 1 the result draws late rows. The other ranks have been told to, and wait in the draw's collectives."""

    def launch(batch: Batch, *_: object) -> PendingStep:
        return PendingStep(batch.step, lambda *_: None, lambda: None)

    def draw_late() -> float:
        raise RuntimeError("a stage failed")

    ranks = Ranks(make_config(2), f"ipc://{tmp_path}/r", lambda _: None)
    rows = SimpleNamespace(has_adapters=lambda _: False)
    executor = stub_executor(ranks, SimpleNamespace(launch=launch, draw_late=draw_late, rows=rows))
    monkeypatch.setattr(ranks.link, "blamed", nullcontext)
    pending = executor.launch(Batch(0))
    with pytest.raises(RuntimeError, match="a stage failed"):
        pending.result()
    assert ranks.has_failed


def test_steps_of_the_warm_up_need_no_frames() -> None:
    """A rank must know which rows of these steps are plain without being told, because no StepFrame comes with them."""

    class Runner:
        cache = SimpleNamespace(layout=BlockLayout(()))

        def launch(self, batch: Batch) -> Any:
            asked.extend(start.sampling for start in batch.starts)
            return self

        def result(self) -> None:
            return

    asked: list[SamplingParams] = []
    run_largest_step(cast("Any", Runner()), 4 * SAMPLES_PER_SEQ, 2, 64)
    assert asked
    for sampling in (*asked, *ASKING):
        assert sampling.logprobs is not None, "gathered by its own parameters"
    assert all(
        sampling == SamplingParams(max_tokens=1, temperature=sampling.temperature) for sampling in (GREEDY, DRAWN)
    )


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_verify_drafts_alike(one: DeviceExecutor, several: DeviceExecutor, kind: str) -> None:
    """Plain rows and rows that rank 0 draws alone; each rank goes on after the same runs."""
    drive = driven(one, kind, ())
    single = ids_of(drive.run())
    drive.leave()
    drive = driven(cast("Any", several), kind, single)
    assert ids_of(drive.run()) == single
    drive.leave()
    assert drive.num_drafts > 40
    assert (drive.num_accepted > 10) == (kind != "wrong")


@pytest.fixture(scope="module")
def drafting(several: DeviceExecutor) -> Iterator[Node]:
    for connector in make_connector(several):
        yield Node(several, connector)


@pytest.mark.integration
def test_every_rank_saves_and_loads(one: DeviceExecutor, several: DeviceExecutor, drafting: Node) -> None:
    """`drafting` has connected the ranks."""
    swap = several._cache.host.num_filled
    assert run_tier(several) == run_tier(one)
    assert several.num_host_blocks == several.most_host_blocks > 2 * swap > 0


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "mode"),  # where steps overlap, those that are mixed have right ones
    [*(pytest.param("right", mode, marks=pytest.mark.slow) for mode in ("off", "on")), ("mixed", "on"), (SILENT, "on")],
)
def test_ranks_verify_drafts_under_grammars_alike(
    drafting: Node, kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone has masks. It decides which places of a run are drawn, and the others go on after the same runs."""
    be_patient(monkeypatch)
    single = GRAMMARS.answered(drafting)
    bench = drafting.bench(kind, mode)
    GRAMMARS.send(bench)
    found = bench.answered()
    expect_same(found, single)
    assert num_drafts(bench) > (20 if kind == SILENT else 100)
    if kind == "right":
        assert found.num_steps < 0.8 * single.num_steps
