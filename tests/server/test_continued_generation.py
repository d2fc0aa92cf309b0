"""Answers of a real engine that are cut after each frame and continued: seeds, penalties, grammars, text."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.server.app import create_app
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.cut_streams import CHAT, COMPLETIONS, Case, asking, check_cuts, data_of, same_content
from tests.engine.test_core_pipeline import CONFIG, make_connector
from tests.in_loop_engine import InLoopEngine
from tests.run_on import RunsOn
from tests.server.cut_nodes import ASKED, PACKAGE, TOOL, USAGE, tool_state
from tests.shallow_model import ONE_LAYER, shallow_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from fastapi import FastAPI

    from pd_cluster.config import NodeConfig
    from pd_connectors.base import Connector

pytestmark = [pytest.mark.anyio, pytest.mark.long]

GREEDY, SEEDED, DRAWN = {"temperature": 0}, {"temperature": 0.9, "seed": -5}, {"temperature": 1.1}
STREAM = {"stream": True, "stream_options": USAGE}
HI: list[Any] = [{"role": "user", "content": "Tell me a story."}]
PENALTIES = {"frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.2, "logit_bias": {"40": 1.5}}
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PREDICTION = {"type": "content", "content": "Once upon a time there was a little dog. The dog was happy and said"}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": OBJECT}}


def plain(name: str, path: str, **more: Any) -> Case:
    prompt = {"messages": HI} if path == CHAT else {"prompt": "Once upon"}
    return Case(name, path, STREAM | prompt | {"max_tokens": 10} | more)


def tools(name: str, **more: Any) -> Case:
    return Case(name, CHAT, STREAM | {"messages": ASKED, "tools": [TOOL], "max_tokens": 60} | more)


DEMO = [
    plain("two choices with logprobs", COMPLETIONS, n=2, logprobs=2, ignore_eos=True),
    plain("penalties", CHAT, n=2, min_tokens=8, bad_words=["the"], logprobs=True, **PENALTIES),
    plain("stop strings", CHAT, stop=["e ", "th", "zzz"], min_tokens=5),
    plain("whole bytes", COMPLETIONS, allowed_token_ids=[172, 253, 247, 222, 100], n=2),
    plain("several prompts", COMPLETIONS, prompt=["Once upon", "The fox", "A"], n=2, echo=True, logprobs=1),
    plain("a JSON object", COMPLETIONS, response_format=FORM, max_tokens=40),
    plain("a prediction", CHAT, n=2, prediction=PREDICTION),
]
CASES = [
    *(("demo_model", one.drawn(**draw)) for one in DEMO for draw in (GREEDY, SEEDED)),
    *(("demo_model", one.drawn(**DRAWN)) for one in (DEMO[0], DEMO[4])),
    ("tool_model", tools("calls").drawn(**GREEDY)),
    ("tool_model", tools("calls that must be made", tool_choice="required", n=2).drawn(temperature=1.5, seed=4)),
    ("tool_model", tools("reasoning", enable_thinking=True).drawn(**GREEDY)),
    ("tool_model", tools("reasoning", enable_thinking=True, n=2).drawn(**SEEDED)),
]


def config_of(model: str) -> NodeConfig:
    directory = shallow_model(ONE_LAYER) if model == "demo_model" else str(PACKAGE / model)
    return replace(
        CONFIG,
        model=replace(CONFIG.model, model=directory),
        cache=replace(CONFIG.cache, num_blocks=20, prefix_caching=False),
        scheduler=replace(CONFIG.scheduler, max_num_seqs=32, max_num_batched_tokens=512),
    )


@pytest.fixture(scope="module", params=["demo_model", "tool_model"])
def model(request: pytest.FixtureRequest) -> Iterator[tuple[str, DeviceExecutor, Connector]]:
    executor = DeviceExecutor.started(config_of(request.param), lambda text: None)
    for connector in make_connector(executor):
        yield request.param, executor, connector
    executor.close()


@contextlib.asynccontextmanager
async def engine_of(executor: DeviceExecutor | RunsOn, connector: Connector, model: str) -> AsyncIterator[InLoopEngine]:
    engine = InLoopEngine(config_of(model), executor, connector)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        try:
            yield engine
            await engine.rest()
        finally:
            running.cancel()


def node_of(engine: InLoopEngine, node_id: str, model: str, stack: contextlib.AsyncExitStack) -> FastAPI:
    """The app of a node, of which the lifespan does not run: `stack` ends its process that checks grammars."""
    state = tool_state(engine, node_id, model)
    stack.callback(state.grammar_checks.close)
    return create_app(state)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 5])
async def test_a_cut_generation_goes_on(model: tuple[str, DeviceExecutor, Connector], step: int) -> None:
    """All cases at once, in a cache that is too small for them: some are preempted with their known tokens."""
    name, executor, connector = model
    async with engine_of(executor, connector, name) as engine, contextlib.AsyncExitStack() as stack:
        first, second = (asking(node_of(engine, node, name, stack)) for node in ("first", "second"))
        mine = [case for of, case in CASES if of == name]
        await asyncio.gather(*(check_cuts(case, first, second, same=same_content, step=step) for case in mine))
        known = [request for request in engine.requests if request.known]
        assert len(known) > 9 * len(mine) / step
    assert engine.stats is not None
    preempted = sum(engine.stats.counters[f"preemptions_{kind}_total"] for kind in ("recompute", "swap"))
    assert preempted > 0


async def test_each_case_needs_continuation(model: tuple[str, DeviceExecutor, Connector]) -> None:
    name, executor, connector = model
    async with engine_of(executor, connector, name) as engine, contextlib.AsyncExitStack() as stack:
        ask = asking(node_of(engine, "node", name, stack))

        async def fails(case: Case) -> None:
            with pytest.raises(AssertionError, match="cut after message"):
                await check_cuts(case, ask, ask, same=same_content, step=1000, continues=False)

        await asyncio.gather(*(fails(case) for of, case in CASES if of == name))


async def test_answers_in_runs_of_tokens_are_those_of_single_ones(
    model: tuple[str, DeviceExecutor, Connector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1.8e9)  # answers say when they were created
    name, executor, connector = model
    told, runs = [], RunsOn(executor, 4)
    for one in (executor, runs):
        async with engine_of(one, connector, name) as engine, contextlib.AsyncExitStack() as stack:
            ask = asking(node_of(engine, "node", name, stack))
            mine = [case for of, case in CASES if of == name and "temperature': 1.1" not in str(case)]
            told.append(await asyncio.gather(*(ask(case.path, case.body) for case in mine)))
    assert runs.num_runs > 5 * len(mine)
    for case, single, several in zip(mine, *told, strict=True):
        assert len(several) < len(single), case
        same_content(data_of(several), data_of(single))
