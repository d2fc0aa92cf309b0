"""Steps that give a sequence several tokens, with the real worker: the answers are those of single tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from pd_cluster.protocol.messages import AddRequest, FinishReason, TicketOpened, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.engine.test_core_pipeline import ONE_LAYERED, PROMPTS, SAMPLINGS, Bench, generate, make_connector
from tests.run_on import RunsOn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.worker.executor import Executor
    from pd_connectors.base import Connector

# An answer alone takes 8 blocks: it would be the same of 14, and nothing is preempted
ALONE = pytest.mark.parametrize("executor", [64], indirect=True)
Answers = dict[tuple[str, int], list[int]]
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
LONGEST = 4


@pytest.fixture(scope="module", params=[14, 64])
def executor(request: pytest.FixtureRequest) -> Iterator[DeviceExecutor]:
    """Of 14 blocks some sequences are preempted."""
    config = replace(ONE_LAYERED, cache=replace(ONE_LAYERED.cache, num_blocks=request.param))
    executor = DeviceExecutor.started(config, lambda text: None)
    yield executor
    executor.close()


@pytest.fixture
def connector(executor: DeviceExecutor) -> Iterator[Connector]:
    yield from make_connector(executor)


def bench_of(executor: DeviceExecutor, connector: Connector, longest: int, prefix_caching: bool = True) -> Bench:
    return Bench(cast("Executor", RunsOn(executor, longest)), connector, "off", prefix_caching)


def answer(bench: Bench, sampling: SamplingParams, known: tuple[int, ...] = ()) -> tuple[list[int], FinishReason]:
    bench.send(AddRequest("r", list(PROMPTS[0]), sampling, known=(known,) if known else ()))
    bench.run()
    return bench.tokens["r", 0], bench.reasons["r", 0]


def greedy(**fields: object) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **fields)


def num_runs(bench: Bench) -> int:
    return cast("RunsOn", bench.core._executor).num_runs


def test_runs_change_no_answer(executor: DeviceExecutor, connector: Connector) -> None:
    """Greedy, drawn, top k, n of 3, penalties with log-probabilities, least tokens; some are preempted."""
    single, runs = (bench_of(executor, connector, longest) for longest in (1, LONGEST))
    expected = generate(single)
    assert generate(runs) == expected
    assert runs.reasons == single.reasons
    assert (num_runs(single), num_runs(runs) > 20) == (0, True)
    assert runs.core._stats.num_steps < single.core._stats.num_steps
    if executor.slabs.num_blocks(0) == 14:
        assert runs.stats is not None
        assert sum(runs.stats.counters[f"preemptions_{kind}_total"] for kind in ("recompute", "swap")) > 0
    else:  # of 14 blocks hardly any stays cached
        assert generate(bench_of(executor, connector, LONGEST)) == expected, "what runs have cached is right"


@pytest.mark.long
@ALONE
def test_a_run_ends_where_the_answer_does(executor: DeviceExecutor, connector: Connector) -> None:
    """By length, by a stop token and by the end of the context, in every place of a run."""
    whole, _ = answer(bench_of(executor, connector, 1), GREEDY)
    for num_tokens in range(20, 20 + LONGEST + 1):
        bench = bench_of(executor, connector, LONGEST)
        assert answer(bench, greedy(max_tokens=num_tokens)) == (whole[:num_tokens], FinishReason.LENGTH)
        assert num_runs(bench) > 0
    ends = sorted({whole.index(token) for token in whole[10:]})[: 2 * LONGEST]
    assert {end % LONGEST for end in ends} == {*range(LONGEST)}
    for end in ends:
        sampling = greedy(stop_token_ids=(whole[end],))
        assert answer(bench_of(executor, connector, LONGEST), sampling) == (whole[: end + 1], FinishReason.STOP)


@ALONE
def test_the_context_ends_inside_a_run(executor: DeviceExecutor, connector: Connector) -> None:
    length = len(PROMPTS[0])
    for most in range(length + 20, length + 25):
        answers = []
        for longest in (1, LONGEST):
            bench = bench_of(executor, connector, longest)
            bench.core._scheduler._arrivals.max_model_len = most
            answers.append(answer(bench, GREEDY))
        assert answers[0] == answers[1]
        assert (len(answers[1][0]), answers[1][1]) == (most - length, FinishReason.LENGTH)


@ALONE
def test_an_answer_goes_on_after_known_tokens_of_a_run(executor: DeviceExecutor, connector: Connector) -> None:
    drawn = greedy(temperature=0.9, seed=11, frequency_penalty=0.7)
    whole, _ = answer(bench_of(executor, connector, 1), drawn)
    for num_known in (1, 7, 8, 9, 30):
        bench = bench_of(executor, connector, LONGEST)
        rest, reason = answer(bench, drawn, tuple(whole[:num_known]))
        assert (rest, reason) == (whole[num_known:], FinishReason.LENGTH)


@ALONE
def test_runs_after_a_handoff(executor: DeviceExecutor, connector: Connector) -> None:
    expected: Answers = generate(bench_of(executor, connector, 1))
    bench = bench_of(executor, connector, LONGEST, prefix_caching=False)

    def take_over(message: TicketOpened) -> None:
        index = int(message.request_id[1:])
        bench.send(AddRequest(f"d{index}", list(PROMPTS[index]), SAMPLINGS[index], Work.TAKE_OVER, message.ticket))

    bench.on_ticket = take_over
    for index in range(5):
        bench.send(AddRequest(f"p{index}", list(PROMPTS[index]), SAMPLINGS[index], Work.PREFILL))
    bench.run()
    assert bench.stats is not None
    assert bench.stats.counters["prefills_remote_total"] == 5
    assert num_runs(bench) > 0
    for (request_id, index), tokens in expected.items():
        if request_id != "r5":
            assert bench.tokens[f"d{request_id[1:]}", index] == tokens
