"""Logits stages from outside: one that bans tokens, and a late one that must know the token before."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pd_cluster.errors import StartupError
from pd_cluster.protocol.messages import AddRequest
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker.cuda_graphs.graph_sizes import decode_sizes
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_cluster.worker.draw_places import DrawVariant
from pd_cluster.worker.logits_stages.stage import LateStage, LogitsStage, StageContext
from pd_cluster.worker.pending_step import PendingStep
from pd_cluster.worker.sampler import Sampled, sample
from pd_cluster.worker.sampling_state import GREEDY, SamplingInputs
from pd_connectors.protocol.messages import SampledToken
from pd_kernels.values import StepSize
from tests.ban_token import BanToken
from tests.engine.test_core_pipeline import CONFIG, PROMPTS, Bench, make_connector
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import make_executor, random_prompts
from tests.worker.repeated_graphs import near_sizes, with_graphs
from tests.worker.tables import table
from tests.worker.test_step_graphs import cuda_executor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.worker.cuda_graphs.captured_step import ReplayOutputs
    from pd_cluster.worker.step_inputs import ReplayInputs
    from pd_kernels.backends import Kernels
    from pd_kernels.values import Ints


class CountUp(LateStage):
    """Each token is the one before it plus one: a grammar in miniature."""

    def __init__(self, context: StageContext) -> None:
        self._last = np.zeros(context.num_rows, np.int64)
        self._active = np.zeros(context.num_rows, bool)
        self._vocab_size = context.vocab_size
        self._move = context.move

    def start(self, row: int, start: SequenceStart) -> bool:
        self._last[row] = start.token_ids[-1]
        self._active[row] = "count" in start.sampling.logits_args
        return bool(self._active[row])

    def prepare(self, rows: Ints, lengths: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        at = np.flatnonzero(self._active[rows])
        return self._move(at), self._move((self._last[rows[at]] + 1) % self._vocab_size)

    def apply(self, logits: torch.Tensor, inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        logits[inputs[0]] = -torch.inf
        logits[inputs] = 0.0

    def note(self, rows: Ints, token_ids: torch.Tensor) -> None:
        assert not token_ids.is_cuda
        self._last[rows] = token_ids.numpy()


class Gated(LateStage):
    """Each token of a row needs an answer from outside."""

    def __init__(self, context: StageContext) -> None:
        self._ring = context.ring
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        self._ring()

    def start(self, row: int, start: SequenceStart) -> bool:
        return "gate" in start.sampling.logits_args

    def absent(self, rows: Ints) -> set[int]:
        return set() if self.is_open else set(rows.tolist())

    def is_unready(self, row: int) -> bool:
        return not self.is_open

    def prepare(self, rows: Ints, lengths: Ints) -> None:
        """It changes nothing."""

    def apply(self, logits: torch.Tensor, inputs: object) -> None:
        raise AssertionError


class LateByItself(BanToken):
    """Says at its construction what its class does not say, and lacks what late stages have."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.is_late = True


class HalfLate(BanToken):
    is_late = True


class Broken(BanToken):
    def __init__(self, context: StageContext) -> None:
        raise RuntimeError("no licence")


STAGES = ("tests.ban_token:BanToken", f"{__name__}:CountUp")


@contextmanager
def served(mode: str, *stages: str) -> Iterator[tuple[Bench, DeviceExecutor]]:
    """An engine on the demo model with these stages, or both of STAGES."""
    config = replace(CONFIG, model=replace(CONFIG.model, logits_stages=stages or STAGES))
    executor = DeviceExecutor.started(config, lambda _: None)
    for connector in make_connector(executor):
        yield Bench(executor, connector, mode), executor
    executor.close()


def tokens_of(bench: Bench, **requests: SamplingParams) -> dict[str, list[int]]:
    for at, (name, params) in enumerate(requests.items()):
        bench.send(AddRequest(name, PROMPTS[at + 1], params))
    bench.run()
    bench.reasons.clear()
    return {name: bench.tokens.pop((name, 0)) for name in requests}


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, **settings)


def stage_of(executor: DeviceExecutor, kind: type[LogitsStage]) -> Any:
    return next(stage for stage, _ in executor._runner.rows._sampling._stages if isinstance(stage, kind))


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_stage_changes_its_own_rows_alone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = SamplingParams(max_tokens=12, temperature=1.1, seed=3, ignore_eos=True, frequency_penalty=0.4)
    with served(mode) as (bench, executor):
        plain = tokens_of(bench, one=greedy(), other=greedy(), drawn=drawn)
        assert stage_of(executor, BanToken).num_rows == 0, "steps without such rows do not ask the stage"
        inputs = list[SamplingInputs]()

        def recorded(logits: torch.Tensor, step: SamplingInputs, kernels: Kernels) -> Sampled:
            inputs.append(step)
            return sample(logits, step, kernels)

        with monkeypatch.context() as patch:
            patch.setattr("pd_cluster.worker.sampler.sample", recorded)
            assert tokens_of(bench, one=greedy(), other=greedy())["one"] == plain["one"]
        assert len(inputs) >= 12
        assert all(step is GREEDY for step in inputs)
        banned = plain["one"][4]
        mixed = tokens_of(bench, one=greedy(logits_args={"ban": banned}), other=greedy(), drawn=drawn)
        assert stage_of(executor, BanToken).num_rows >= 12
        assert mixed["one"][:4] == plain["one"][:4]
        assert banned not in mixed["one"]
        assert mixed | {"one": plain["one"]} == plain
        assert tokens_of(bench, one=greedy(), other=greedy(), drawn=drawn) == plain, "the next request of a row"


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_late_stage_knows_the_token_before(mode: str) -> None:
    """Beside penalties and draws. Its sequence leaves before the others do."""
    penalized = greedy(frequency_penalty=0.9, repetition_penalty=1.2)
    drawn = SamplingParams(max_tokens=20, temperature=1.1, seed=3, ignore_eos=True)
    counting = SamplingParams(max_tokens=14, temperature=0.7, ignore_eos=True, logits_args={"count": True})
    with served(mode) as (bench, _):
        plain = tokens_of(bench, counted=greedy(), penalized=penalized, drawn=drawn)
        mixed = tokens_of(bench, counted=counting, penalized=penalized, drawn=drawn)
    assert mixed["counted"] == list(range(PROMPTS[1][-1] + 1, PROMPTS[1][-1] + 15))
    assert mixed | {"counted": plain["counted"]} == plain


def test_arguments_that_a_stage_refuses_are_an_invalid_request() -> None:
    with served("off") as (bench, _):
        bench.send(AddRequest("wrong", PROMPTS[1], greedy(logits_args={"ban": "seven"})))
        with pytest.raises(AssertionError, match="logits_args: ban must be a token id"):
            bench.run()
        bench.open.clear()
        bench.mailbox.outbox.clear()
        assert len(tokens_of(bench, right=greedy(logits_args={"ban": 7}))["right"]) == 12


def serve_late_rows(executor: DeviceExecutor, depth: int, *, with_chunks: bool = False) -> list[tuple[int, ...]]:
    """Two sequences, one that counts up and one that draws: the tokens of each of their first seven steps.

    So many steps as `depth` are under way before the oldest is read. `with_chunks`: every second step also computes a
    part of a third prompt.
    """
    prompts, flights, tokens = random_prompts([20, 9, 70], VOCAB_SIZE), list[PendingStep](), list[tuple[int, ...]]()
    kinds = [SamplingParams(max_tokens=9, logits_args=args) for args in ({"count": 1}, {}, {})]
    starts = tuple(
        SequenceStart(i, tuple(prompt), len(prompt), table(tuple(range(5 * i, 5 * i + 5))), kind, i)
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    )
    for step in range(7):
        parts = [(0, 19 + step, 1), (1, 8 + step, 1)] if step else [(0, 0, 20), (1, 0, 9)]
        chunks = tuple(SequenceChunk(*part, num_samples=1) for part in parts)
        more = (SequenceChunk(2, 10 * step - 10, 20),) if with_chunks and step % 2 else ()
        flights.append(executor.launch(Batch(step, () if step else starts, chunks + more)))
        assert not flights[-1].is_launched
        assert not flights[-1].is_over
        while flights and (len(flights) == depth or step == 6):
            samples = flights.pop(0).result().samples
            tokens.append((samples[0][0].token_id, samples[1][0].token_id))
        if step % 2:  # else the next launch draws them, or the result
            executor.draw_late()
            assert all(pending.is_launched for pending in flights)
    executor.launch(Batch(7, departures=(0, 1, 2))).result()
    assert [counted for counted, _ in tokens] == [(prompts[0][-1] + 1 + step) % VOCAB_SIZE for step in range(7)]
    return tokens


@pytest.mark.parametrize("is_replayed", [False, True])
def test_late_rows_are_drawn_when_the_step_before_was_read(models: ModelStore, is_replayed: bool) -> None:
    executor = make_executor(models.get("qwen3").directory, logits_stages=STAGES)
    sizes = [*decode_sizes(2), *near_sizes(32, 3)]
    replayed = with_graphs(executor, sizes).replayed if is_replayed else []
    for with_chunks in (False, True):
        found = serve_late_rows(executor, 2, with_chunks=with_chunks)
        assert found == serve_late_rows(executor, 1, with_chunks=with_chunks)
    assert [bool(size.num_chunks) for size in replayed] == [
        *[True, *[False] * 6] * 2, *[True, *[True, False] * 3] * 2
    ][: 28 * is_replayed]  # fmt: skip
    executor.close()


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize(
    "others", [{}, {"top_k": 9, "logprobs": 2}, {"frequency_penalty": 0.9, "logit_bias": {5: 4.0}}]
)
def test_rows_beside_late_ones_are_drawn_at_launch(
    models: ModelStore, is_replayed: bool, others: dict[str, Any]
) -> None:
    """In each step two rows count up, between two that do not. One of each kind has penalties."""
    executor, drawn = make_executor(models.get("qwen3").directory, logits_stages=STAGES), list[DrawVariant]()
    if is_replayed:
        drawn = with_graphs(executor, [*decode_sizes(6), *near_sizes(32, 6)]).drawn
    counting: dict[str, Any] = {"logits_args": {"count": 1}}
    kinds = [
        SamplingParams(max_tokens=9, **settings)
        for settings in (others, counting, {}, {**counting, "presence_penalty": 1.0, "logprobs": 1})
    ]
    prompts, found = random_prompts([9, 20, 5, 11], VOCAB_SIZE), list[list[list[SampledToken]]]()
    for depth in (1, 2):
        starts = tuple(
            SequenceStart(i, tuple(prompt), len(prompt), table((2 * i, 2 * i + 1)), kind, i)
            for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
        )
        flights, tokens, at_launch = list[PendingStep](), list[list[SampledToken]](), list[list[int]]()
        for step in range(6):
            ends = [len(prompt) + step for prompt in prompts]
            chunks = [
                SequenceChunk(i, end - 1 if step else 0, 1 if step else end, num_samples=1)
                for i, end in enumerate(ends)
            ]
            flights.append(executor.launch(Batch(step, () if step else starts, tuple(chunks))))
            rows = executor._runner.rows
            at_launch.append([int(rows.last_tokens[rows._row_of[i]]) for i in (0, 2)])
            while flights and (len(flights) == depth or step == 5):
                samples = flights.pop(0).result().samples
                tokens.append([samples[i][0] for i in range(4)])
        executor.launch(Batch(6, departures=(0, 1, 2, 3))).result()
        assert at_launch == [[step[0].token_id, step[2].token_id] for step in tokens]
        for i in (1, 3):
            expected = [(prompts[i][-1] + 1 + step) % VOCAB_SIZE for step in range(6)]
            assert [step[i].token_id for step in tokens] == expected
        assert [step[3].logprob is not None for step in tokens] == [True] * 6
        found.append(tokens)
    assert found[0] == found[1]
    assert len(drawn) == 10 * bool(others) * is_replayed, "all steps but the prompts, which no graph has room for"
    executor.close()


def test_a_stage_that_waits_for_something_outside_wakes_the_loop() -> None:
    with served("on", f"{__name__}:Gated") as (bench, executor):
        plain = tokens_of(bench, one=greedy())
        bench.send(AddRequest("one", PROMPTS[1], greedy(logits_args={"gate": True})))
        while bench.core.turn():
            pass
        bench.mailbox.bell.clear()
        assert not bench.core.turn(), "the loop sleeps"
        assert not bench.mailbox.bell.is_set()
        thread = Thread(target=stage_of(executor, Gated).open)
        thread.start()
        thread.join()
        assert bench.mailbox.bell.is_set()
        bench.run()
        assert bench.tokens["one", 0] == plain["one"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("with_chunks", [False, True])
def test_on_a_gpu_late_rows_are_drawn_from_what_a_graph_computed(models: ModelStore, with_chunks: bool) -> None:
    """Bit by bit as when they are drawn at once."""
    executor, sizes = cuda_executor(models.get("qwen3").directory, 64, logits_stages=STAGES), list[StepSize]()
    replay = executor._runner.graphs.replay

    def noted(inputs: ReplayInputs, size: StepSize) -> ReplayOutputs:
        sizes.append(size)
        return replay(inputs, size)

    executor._runner.graphs.replay = noted  # type: ignore[method-assign]
    found = serve_late_rows(executor, 2, with_chunks=with_chunks)
    assert found == serve_late_rows(executor, 1, with_chunks=with_chunks)
    assert len(sizes) == 14
    assert {size.num_chunks > 0 for size in sizes[1:7]} == ({False, True} if with_chunks else {False})
    executor.close()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_colon", "write package.module:Class"),
        ("no.such.module:Stage", "No module named"),
        (f"{__name__}:Missing", "has no attribute 'Missing'"),
        (f"{__name__}:Broken", "no licence"),
        ("builtins:id", "is not a LogitsStage: it lacks is_late, check, start, prepare, apply, note"),
        (f"{__name__}:HalfLate", "is not a LateStage: it lacks absent, is_unready, take_failures"),
        (f"{__name__}:LateByItself", "is not a LateStage: it lacks absent, is_unready, take_failures"),
    ],
)
def test_a_path_that_names_no_stage_ends_the_start(models: ModelStore, path: str, words: str) -> None:
    with pytest.raises(StartupError, match=f"--logits-stage {path}.*{words}"):
        make_executor(models.get("qwen3").directory, logits_stages=(path,))
