"""Orders to the engine: cached prefixes are forgotten, and its work is recorded."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pd_cluster.engine.core import PAUSE_S, EngineCore
from pd_cluster.protocol.messages import AddRequest, SilenceAllowed
from pd_cluster.protocol.orders import ResetCache, SetRole, StartProfile, StopProfile
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.host_tier import HOST_GB_S
from pd_cluster.scheduling.step_model import StepModel, StepWork, keys_of
from pd_cluster.scheduling.targets import AIM, KEPT_GAP_S, Targets
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_connectors.protocol.feed import NodeLoad
from tests.engine.test_core_pipeline import CONFIG, PROMPTS, Bench, FakeMailbox, make_connector

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    executor = DeviceExecutor.started(CONFIG, lambda _: None)
    for connector in make_connector(executor):
        yield Bench(executor, connector, "off")
    executor.close()


def num_cached_blocks(bench: Bench) -> int:
    assert bench.stats is not None
    return bench.stats.kv.cached


def ask(bench: Bench, name: str) -> list[int]:
    bench.send(AddRequest(name, list(PROMPTS[0]), PARAMS))
    bench.run()
    return bench.tokens[name, 0]


def test_a_reset_frees_what_nothing_uses_and_answers_stay_the_same(bench: Bench) -> None:
    first = ask(bench, "a")
    assert num_cached_blocks(bench) > 0
    bench.send(ResetCache())
    bench.run()
    assert bench.stats is not None
    assert (bench.stats.kv.cached, bench.stats.kv.free) == (0, bench.stats.kv.num_blocks)
    assert ask(bench, "b") == first
    # beside a running request: its blocks stay, and the engine counts all of them at its end (`BlockManager.check`)
    bench.send(AddRequest("c", list(PROMPTS[0]), PARAMS))
    bench.core.turn()
    bench.send(ResetCache())
    bench.run()
    assert bench.tokens["c", 0] == first


def test_a_record_is_written_once(bench: Bench, tmp_path: Path) -> None:
    bench.send(StopProfile(str(tmp_path)))  # there is none
    bench.send(StartProfile())
    bench.send(StartProfile())
    ask(bench, "recorded")
    bench.send(StopProfile(str(tmp_path / "new")))
    bench.core.turn()
    allowed = [one.seconds for one in bench.mailbox.outbox if isinstance(one, SilenceAllowed)]
    assert allowed == [PAUSE_S, bench.core._pipeline.allowed_s], "the longer silence is over"
    bench.send(StopProfile(str(tmp_path)))
    bench.run()
    (path,) = (one for one in tmp_path.rglob("*") if one.is_file())
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_no_step_is_under_way_while_a_record_is_written(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes up to a minute, and a step that waits for the draw of its late rows has 5 s on other ranks."""
    overlapped = Bench(bench.core._executor, bench.core._connector, "on")
    under_way: list[int] = []
    pipeline = overlapped.core._pipeline
    monkeypatch.setattr(overlapped.core._executor, "stop_profile", lambda _: under_way.append(len(pipeline)))
    overlapped.send(AddRequest("a", list(PROMPTS[0]), SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)))
    while len(pipeline) < 2:
        overlapped.core.turn()
    overlapped.send(StopProfile("d"))
    overlapped.run()
    assert under_way == [0]
    assert len(overlapped.tokens["a", 0]) == 9


def test_a_directory_that_cannot_be_written_ends_nothing(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bench.send(StartProfile())
    bench.send(StopProfile(str(tmp_path / "file")))
    assert len(ask(bench, "afterwards")) == 2


@pytest.mark.parametrize("is_measured", [True, False])  # False: started in another role, or beside another node
def test_a_role_sets_the_limit_of_prompts_beside_decodes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_measured: bool
) -> None:
    """By the steps at start, which later ones do not change."""
    executor, connector = bench.core._executor, bench.core._connector
    times = tuple((work, 2 * StepModel().seconds(work)) for work in (StepWork(32, 32_768), StepWork(1, 1024)))
    model = replace(executor.model, device="cuda:0", step_times=times if is_measured else ())
    monkeypatch.setattr(executor, "model", model)
    core = EngineCore(CONFIG, executor, connector, FakeMailbox())
    usual = Targets().on("decode", "cuda:0", StepModel(model.step_times), model.spec.keys_per_token)
    assert AIM * usual.itl_s == pytest.approx(0.0077 * (1 + is_measured), rel=0.02)
    for _ in range(40):
        core._step_model.note(StepWork(32, 32_768), 1.0)
    for role in ("decode", "mixed", "decode", "prefill"):
        core._take(SetRole(role))
        expected = {"decode": usual, "mixed": Targets(), "prefill": Targets(itl_s=KEPT_GAP_S)}[role]
        assert core._step_budget.targets == expected, role
        assert (core._step_budget.model is core._step_model) == (role == "prefill"), "later steps correct what P tells"
        assert core._room.gap_s == expected.itl_s


def test_a_node_that_becomes_a_decode_node_goes_by_the_steps_that_it_has_had(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started as a mixed node it has measured none: its steps take three times those of 8B."""
    executor, connector = bench.core._executor, bench.core._connector
    monkeypatch.setattr(executor, "model", replace(executor.model, device="cuda:0", step_times=()))
    core = EngineCore(CONFIG, executor, connector, FakeMailbox())
    core._take(SetRole("decode"))
    assert core._step_budget.targets.itl_s * AIM == pytest.approx(0.0077, rel=0.02), "it has had none"
    for num_tokens in (0, 96, 480, 992) * 20:
        work = StepWork(32, 32_768, num_tokens, keys_of(num_tokens, 0))
        core._step_model.note(work, 3 * StepModel().seconds(work))
    core._take(SetRole("decode"))
    assert core._step_budget.targets.itl_s * AIM == pytest.approx(0.0231, rel=0.1)
    assert core._step_budget.model is not core._step_model, "later steps do not change the limit"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_prefill_node_on_a_cpu_keeps_no_stream_whatever_its_gaps(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    executor, connector = bench.core._executor, bench.core._connector
    times = tuple((StepWork(num, num * 1024), StepModel().seconds(StepWork(num, num * 1024))) for num in (1, 32))
    monkeypatch.setattr(executor, "model", replace(executor.model, device=device, step_times=times))
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, slo_itl_ms=100.0))
    core = EngineCore(config, executor, connector, FakeMailbox())
    core._take(SetRole("prefill"))
    load = core._room.filled_in(NodeLoad(num_slots=64, free_blocks=100, num_blocks=100, block_size=64), 0)
    assert (load.kept_tokens > 0) == (device != "cpu")


def test_prompts_of_a_prefill_node_come_before_its_streams(bench: Bench) -> None:
    executor, connector = bench.core._executor, bench.core._connector
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, slo_tpot_ms=20.0))
    core = EngineCore(config, executor, connector, FakeMailbox())
    targets = Targets.of(config.scheduler)
    for role in ("prefill", "decode", "prefill", "mixed"):
        core._take(SetRole(role))
        is_prefill = role == "prefill"
        assert core._step_budget.targets == (Targets(itl_s=targets.itl_s) if is_prefill else targets), role
        assert core._room.prompts_first == is_prefill


@pytest.mark.parametrize(("policy", "may"), [("any", True), ("local", True), ("remote", False), ("fail", False)])
def test_a_load_is_given_up_only_where_this_node_may_compute_it(bench: Bench, policy: str, may: bool) -> None:
    config = replace(CONFIG, handoff=replace(CONFIG.handoff, on_load_failure=policy))
    core = EngineCore(config, bench.core._executor, bench.core._connector, FakeMailbox())
    assert core._transfers._may_give_up == may


def test_the_link_that_was_measured_prices_loads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, connector = bench.core._executor, bench.core._connector
    assert bench.core._blocks.host.gb_s == HOST_GB_S, "a CPU has no link"
    monkeypatch.setattr(executor, "host_gb_s", 10.6)
    assert EngineCore(CONFIG, executor, connector, FakeMailbox())._blocks.host.gb_s == pytest.approx(5.0)
