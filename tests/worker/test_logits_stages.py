"""Logits stages from outside: one that bans tokens, and a late one that must know the token before."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pd_cluster.errors import StartupError
from pd_cluster.protocol.messages import AddRequest
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker.cuda_graphs.captured_steps import ReplayOutputs
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_cluster.worker.logits_stages.stage import LogitsStage, StageContext
from pd_cluster.worker.sampler import Sampled, sample
from pd_cluster.worker.sampling_state import GREEDY, SamplingInputs
from tests.ban_token import BanToken
from tests.engine.test_core_pipeline import CONFIG, PROMPTS, Bench, make_connector
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import make_executor, random_prompts
from tests.worker.test_decode_graphs import SIZES, with_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.worker.input_batch import ReplayInputs
    from pd_kernels.backends import Kernels
    from pd_kernels.values import Ints, StepSize


class CountUp(LogitsStage):
    """Each token is the one before it plus one: a grammar in miniature."""

    is_late = True

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


class Broken(BanToken):
    def __init__(self, context: StageContext) -> None:
        raise RuntimeError("no licence")


STAGES = ("tests.ban_token:BanToken", f"{__name__}:CountUp")


@contextmanager
def served(mode: str) -> Iterator[tuple[Bench, DeviceExecutor]]:
    """An engine on the demo model with both stages."""
    config = replace(CONFIG, model=replace(CONFIG.model, logits_stages=STAGES))
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
            patch.setattr("pd_cluster.worker.model_runner.sample", recorded)
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


@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_step_with_late_rows_is_drawn_when_the_one_before_was_read(models: ModelStore, is_replayed: bool) -> None:
    executor = make_executor(models.get("qwen3").directory, logits_stages=STAGES)
    if is_replayed:
        _, graphs, _ = with_graphs(executor, SIZES)
        replay = graphs.replay

        def copied(inputs: ReplayInputs, size: StepSize) -> ReplayOutputs:
            outputs = replay(inputs, size)
            return ReplayOutputs(outputs.logits, outputs.token_ids.clone())  # as the copy to the host does on a device

        graphs.replay = copied  # type: ignore[method-assign]
    prompts = random_prompts([20, 9], VOCAB_SIZE)
    kinds = SamplingParams(max_tokens=9, logits_args={"count": 1}), SamplingParams(max_tokens=9, temperature=0.0)
    starts = tuple(
        SequenceStart(i, tuple(prompt), len(prompt), (2 * i, 2 * i + 1), kind, i)
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    )
    chunks = tuple(SequenceChunk(i, 0, len(prompt), num_samples=1) for i, prompt in enumerate(prompts))
    pending, counted = executor.launch(Batch(0, starts, chunks)), list[int]()
    assert pending.is_over, "a prompt's tokens are all known"
    for step in range(6):
        chunks = tuple(SequenceChunk(i, len(prompt) + step, 1, num_samples=1) for i, prompt in enumerate(prompts))
        following = executor.launch(Batch(step + 1, (), chunks))
        assert not following.is_over
        counted.append(pending.result().samples[0][0].token_id)
        assert following.is_over
        pending = following
    assert counted == [(prompts[0][-1] + 1 + step) % VOCAB_SIZE for step in range(6)]
    pending.result()
    executor.close()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_colon", "write package.module:Class"),
        ("no.such.module:Stage", "No module named"),
        (f"{__name__}:Missing", "has no attribute 'Missing'"),
        (f"{__name__}:Broken", "no licence"),
        ("builtins:id", "is not a LogitsStage: it lacks is_late, check, start, prepare"),
    ],
)
def test_a_path_that_names_no_stage_ends_the_start(models: ModelStore, path: str, words: str) -> None:
    with pytest.raises(StartupError, match=f"--logits-stage {path}.*{words}"):
        make_executor(models.get("qwen3").directory, logits_stages=(path,))
