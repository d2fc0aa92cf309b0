"""Models that keep states, by the real scheduler and executor: each draw's logits beside those of transformers."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from pd_cluster.config import ModelConfig, NodeConfig
from pd_cluster.engine.core import EngineCore
from pd_cluster.errors import StartupError
from pd_cluster.protocol.messages import Work
from pd_cluster.protocol.sampling_params import BeamParams
from pd_cluster.worker.cuda_graphs.graph_sizes import decode_sizes
from pd_kernels.backends import TORCH
from pd_kernels.torch_state import TorchState
from pd_kernels.values import StepSize
from tests.engine.test_core_pipeline import FakeMailbox
from tests.models.state_models import STATE_MODELS
from tests.worker.conftest import SavedModel, save_model
from tests.worker.driver import make_executor, random_prompts
from tests.worker.repeated_graphs import near_sizes, with_graphs
from tests.worker.scheduled import ScheduledWorker, largest_error
from tests.worker.test_logits_stages import Gated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pd_cluster.worker.cuda_graphs.captured_step import ReplayOutputs
    from pd_cluster.worker.logits_stages.stage import StageContext
    from pd_cluster.worker.step_inputs import ReplayInputs
    from pd_kernels.state import StateOps, StatePlan


TOLERANCE = 1e-4  # of the logits' deviation, as in tests/models/test_qwen3_next.py
PIECE = 64


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    kind, options = STATE_MODELS["qwen3-next"]
    return save_model(kind, tmp_path_factory.mktemp("state"), options)


@pytest.fixture
def start(saved: SavedModel) -> Iterator[Callable[..., ScheduledWorker]]:
    """Starts a node. Memory that nothing has written is NaN."""
    executors = []

    def make(num_blocks: int = 40, **options: object) -> ScheduledWorker:
        executors.append(make_executor(saved.directory, num_blocks=num_blocks))
        return ScheduledWorker(executors[-1], **options)  # type: ignore[arg-type]

    yield make
    for executor in executors:
        executor.close()


def shared_prompts(length: int, *ends: int) -> list[list[int]]:
    """Prompts with the same first `length` tokens, and so many more each."""
    head, *tails = random_prompts((length, *ends), 320, seed=length)
    return [[*head, *tail] for tail in tails]


def test_states_that_the_kernels_do_not_compute_are_refused_by_name(
    saved: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the weights are read."""
    refusing = SimpleNamespace(problem=lambda key_dim, value_dim: f"heads of {key_dim} and {value_dim}")
    kernels = replace(TORCH, state=cast("StateOps", refusing))
    monkeypatch.setattr("pd_cluster.worker.device_plan.select_kernels", lambda device: kernels)
    with pytest.raises(StartupError, match=r"for cpu do not compute the states of Qwen3NextForCausalLM: heads of 16 a"):
        make_executor(saved.directory)


@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_beside_decodes_have_the_logits_of_whole_prompts(
    saved: SavedModel, start: Callable[..., ScheduledWorker], depth: int
) -> None:
    worker = start(budget=37, depth=depth)
    for number, ids in enumerate(random_prompts((1, 5, 64, 75, 130), 320)):
        worker.add(f"{number}", ids, max_tokens=9 + number)
    worker.run()
    assert largest_error(worker, saved.model) < TOLERANCE


@pytest.mark.parametrize("length", [64, 150])
def test_a_hit_goes_on_from_the_state_at_its_end(
    saved: SavedModel, start: Callable[..., ScheduledWorker], length: int
) -> None:
    """At the end of a prompt, then at a branch, and at the newest piece of an answer."""
    worker, (first, second, third) = start(budget=50), shared_prompts(length, 70, 80, 20)
    worker.add("first", first, max_tokens=60)
    worker.run()
    answered = worker.outputs["first"][0]
    turn = worker.add("turn", [*first, *answered, *range(10, 40)])
    worker.run()
    assert turn.sequences[0].num_cached_tokens == (len(first) + len(answered) - 1) // PIECE * PIECE
    branch = worker.add("branch", second)
    worker.run()
    assert branch.sequences[0].num_cached_tokens == 0, "there is no state where the prompts part"
    after = worker.add("after", third)
    worker.run()
    assert after.sequences[0].num_cached_tokens == length // PIECE * PIECE
    assert largest_error(worker, saved.model) < TOLERANCE


def test_answers_of_one_prompt_go_on_in_slots_of_their_own(
    saved: SavedModel, start: Callable[..., ScheduledWorker]
) -> None:
    worker, (prompt,) = start(budget=64), shared_prompts(64, 10)
    for name, ids in (("n", prompt), ("whole pieces", prompt[:64])):
        worker.add(name, ids, n=4, max_tokens=6, temperature=1.0)
    worker.run()
    assert len(set(map(tuple, worker.outputs["n"]))) > 1
    assert largest_error(worker, saved.model) < TOLERANCE


def test_beams_go_on_from_the_states_of_other_beams(
    saved: SavedModel, start: Callable[..., ScheduledWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two searches at once that pass the end of a piece, in so little memory that beams are preempted."""
    monkeypatch.setattr(saved.model.generation_config, "eos_token_id", None)
    worker, prompts = start(6, budget=48), random_prompts((58, 5), 320, seed=4)
    for number, ids in enumerate(prompts):
        worker.add(f"{number}", ids, max_tokens=8, n=4, beams=BeamParams(width=4))
    worker.run()
    assert worker.scheduler.counters["preemptions_swap_total"] > 0
    for number, ids in enumerate(prompts):
        with torch.inference_mode():
            rows = saved.model.generate(
                torch.tensor([ids]), max_new_tokens=8, num_beams=4, num_return_sequences=4, use_cache=False
            )
        assert worker.outputs[f"{number}"] == rows[:, len(ids) :].tolist()


@pytest.mark.parametrize("swaps", [False, True])
def test_a_preempted_sequence_goes_on_with_its_state(
    saved: SavedModel, start: Callable[..., ScheduledWorker], swaps: bool
) -> None:
    worker = start(num_blocks=7, budget=48, swaps=swaps)
    for number, ids in enumerate(random_prompts((20, 30, 25, 18, 22), 320)):
        worker.add(f"{number}", ids, max_tokens=70)
    worker.run()
    counters = worker.scheduler.counters
    assert counters[f"preemptions_{'swap' if swaps else 'recompute'}_total"] > 0
    assert largest_error(worker, saved.model) < TOLERANCE


@pytest.mark.parametrize("length", [5, 64, 75])
def test_a_prompt_is_handed_over_with_its_state(
    saved: SavedModel, start: Callable[..., ScheduledWorker], length: int
) -> None:
    """Also when all of its blocks are cached here."""
    prefill, decode = start(budget=23), start()
    (prompt,) = random_prompts((length,), 320, seed=length)
    for name in ("first", "again"):
        prefill.add(name, prompt, work=Work.PREFILL)
        prefill.run()
        decode.take_over(decode.add(name, prompt, max_tokens=5, work=Work.TAKE_OVER), prefill, f"lease-{name}")
        decode.run()
    assert decode.outputs["first"] == decode.outputs["again"]
    assert largest_error(prefill, saved.model) < TOLERANCE
    assert largest_error(decode, saved.model) < TOLERANCE


@pytest.mark.parametrize(("length", "num_known"), [(64, 1), (60, 5), (75, 4), (30, 40)])
def test_a_begun_answer_goes_on_with_the_state_before_its_last_token(
    saved: SavedModel, start: Callable[..., ScheduledWorker], length: int, num_known: int
) -> None:
    """Two decode nodes die. P goes on from its own state at the prompt's end, and the next node computes one token."""
    prefill, known = start(budget=23), list[int]()
    (prompt,) = random_prompts((length,), 320, seed=length)
    answers, states = [], [0]  # states that P has kept, by their tokens
    for name, num_more in (("first", num_known), ("second", 3), ("third", 0)):
        loaded = prompt + known[:-1]
        read = prefill.add(name, loaded, work=Work.PREFILL)
        prefill.run()
        assert read.num_cached_tokens == max(kept for kept in states if kept < len(loaded))
        states.append(len(loaded) // PIECE * PIECE)
        decode = start()
        request = decode.add(name, prompt, max_tokens=num_known + 9, work=Work.TAKE_OVER, known=known)
        decode.take_over(request, prefill, f"lease-{name}")
        decode.run()
        assert request.num_external_tokens == len(loaded)
        assert decode.drawn[0].end == len(loaded) + 1
        assert largest_error(decode, saved.model) < TOLERANCE
        answers.append(known + decode.outputs[name][0])
        known = answers[0][: len(known) + num_more]
    assert answers == answers[:1] * 3
    assert largest_error(prefill, saved.model) < TOLERANCE


def test_a_checkpoint_that_the_device_evicted_is_found_in_host_memory(
    saved: SavedModel, start: Callable[..., ScheduledWorker]
) -> None:
    worker, prompts = start(num_blocks=6, budget=64, host_cache=True), shared_prompts(64, 10, 20)
    worker.blocks.host.gb_s, worker.blocks.copies.wait_s = inf, 0.0  # whatever is there is loaded
    worker.add("first", prompts[0], max_tokens=1)
    worker.run()
    for number, ids in enumerate(random_prompts((70, 80, 90), 320, seed=3)):
        worker.add(f"{number}", ids, max_tokens=1)
        worker.run()
    before = worker.blocks.host.num_loaded
    worker.add("second", prompts[1])
    worker.run()
    assert worker.blocks.host.num_loaded > before
    assert largest_error(worker, saved.model) < TOLERANCE


def test_replayed_decodes_read_and_write_their_slots(saved: SavedModel, start: Callable[..., ScheduledWorker]) -> None:
    """Padding writes a slot that no sequence has, and a checkpoint is saved by a replay, too."""
    worker, prompts = start(budget=64), shared_prompts(61, 1, 0, 9)
    repeated = with_graphs(worker.executor, decode_sizes(4))
    for number, ids in enumerate(prompts):
        worker.add(f"{number}", ids, max_tokens=6)
    worker.run()
    answered = [*prompts[0], *worker.outputs["0"][0], *range(9)]
    turn = worker.add("turn", answered, max_tokens=1)
    worker.run()
    assert turn.sequences[0].num_cached_tokens == PIECE
    assert len(repeated.replayed) > 4
    assert largest_error(worker, saved.model) < TOLERANCE


class Unwritten(TorchState):
    """Leaves NaN where a step has padding, as kernels do in memory that nothing has written."""

    def convolve(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        return unwritten(super().convolve(x, *others), others[-1])

    def mix_gated(self, q: torch.Tensor, *others: Any) -> torch.Tensor:
        return unwritten(super().mix_gated(q, *others), others[-2])


def unwritten(rows: torch.Tensor, plan: StatePlan) -> torch.Tensor:
    if not plan.is_decode:
        rows[int(plan.starts[-1]) :] = torch.nan
    return rows


@pytest.mark.parametrize("depth", [1, 2])
def test_replayed_steps_with_prompts_read_write_and_save_states(
    saved: SavedModel, start: Callable[..., ScheduledWorker], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Prompts in chunks beside decodes. Their checkpoint is saved by a replay."""
    kernels = replace(TORCH, state=Unwritten())
    monkeypatch.setattr("pd_cluster.worker.device_plan.select_kernels", lambda device: kernels)
    worker = start(budget=90, depth=depth)
    repeated = with_graphs(worker.executor, [*decode_sizes(4), *near_sizes(90, 8)])
    monkeypatch.setattr(worker.executor._runner, "_compute", None)  # no step is launched as it is
    run_prompts_and_a_hit(worker)
    assert sum(size.num_chunks > 0 for size in repeated.replayed) >= 7
    assert any(size.num_chunks and size.has_decodes for size in repeated.replayed)
    assert largest_error(worker, saved.model) < TOLERANCE


def run_prompts_and_a_hit(worker: ScheduledWorker) -> None:
    """Prompts, then one that goes on from the checkpoint at the end of the first one's last piece."""
    (first, turn), others = shared_prompts(150, 3, 40), random_prompts((1, 5, 64, 75, 130), 320)
    for number, ids in enumerate([first, *others]):
        worker.add(f"{number}", ids, max_tokens=4 + number)
    worker.run()
    hit = worker.add("hit", [*first, *turn[150:]], max_tokens=3)
    worker.run()
    assert hit.sequences[0].num_cached_tokens == 2 * PIECE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["qwen3-next", "qwen3.5"])
def test_graphs_of_steps_with_prompts_read_write_and_save_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """On a GPU, as the node's own start has captured them. Heads have sizes that the kernels compute."""
    name, options = STATE_MODELS[kind]
    saved = save_model(name, tmp_path, {**options, "linear_value_head_dim": 32})
    executor, replayed = make_executor(saved.directory, device="cuda"), list[StepSize]()
    worker, replay = ScheduledWorker(executor, budget=90), executor._runner.graphs.replay

    def noted(inputs: ReplayInputs, size: StepSize) -> ReplayOutputs:
        replayed.append(size)
        return replay(inputs, size)

    monkeypatch.setattr(executor._runner, "_compute", None)  # no step is launched as it is
    monkeypatch.setattr(executor._runner.graphs, "replay", noted)
    run_prompts_and_a_hit(worker)
    assert sum(size.num_chunks > 0 for size in replayed) >= 7
    assert largest_error(worker, saved.model) < 1e-3
    executor.close()


class GatedByItself(Gated):
    """Its class does not say that it is late."""

    is_late = False

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.is_late = True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_cache_dtype", "fp8"),
        ("logits_stages", ("tests.worker.test_logits_stages:Gated",)),
        ("logits_stages", (f"{__name__}:GatedByItself",)),
    ],
)
def test_what_cannot_be_served_with_states_ends_the_start(saved: SavedModel, name: str, value: Any) -> None:
    with pytest.raises(StartupError, match=r"--(kv-cache-dtype fp8|logits-stage \S+).* not served .* keeps states"):
        make_executor(saved.directory, **{name: value})


def test_a_pool_takes_no_states(saved: SavedModel) -> None:
    executor: Any = make_executor(saved.directory, num_blocks=40)
    connector: Any = SimpleNamespace(pool=object())
    with pytest.raises(StartupError, match="a pool takes no states"):
        EngineCore(NodeConfig(model=ModelConfig(model="m")), executor, connector, FakeMailbox())
    executor.close()
