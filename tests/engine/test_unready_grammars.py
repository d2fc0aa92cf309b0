"""Requests with a grammar that is not compiled yet, in the engine: they cost no step, and nothing polls for them."""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.errors import Overloaded
from pd_cluster.protocol.messages import AddRequest, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling import unready
from pd_cluster.worker.grammars import Grammars
from tests.engine.test_constrained_steps import FailingBench, connector, executor
from tests.engine.test_core_pipeline import PROMPTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.worker.device_executor import DeviceExecutor
    from pd_connectors.base import Connector

__all__ = ["connector", "executor"]

pytest.importorskip("llguidance")

CONSTRAINED = SamplingParams(max_tokens=8, temperature=1.0, seed=1, n=2, grammar="start: /[0-9]{5}/")
FREE = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """No grammar is compiled while it is closed."""
    gate, compile_it = Event(), Grammars._compile

    def gated(grammars: Grammars, grammar: str) -> Any:
        assert gate.wait(60)
        return compile_it(grammars, grammar)

    monkeypatch.setattr(Grammars, "_compile", gated)
    yield gate
    gate.set()


@pytest.fixture
def bench(request: pytest.FixtureRequest, executor: DeviceExecutor, connector: Connector) -> FailingBench:
    executor._grammars._compiled.clear()
    return FailingBench(executor, connector, request.param)


def num_steps(bench: FailingBench) -> int:
    return bench.core._stats.num_steps


@pytest.mark.parametrize("bench", ["off", "on"], indirect=True)
@pytest.mark.parametrize("length", [60, 1], ids=["a row in the worker", "no row"])
def test_a_grammar_that_is_compiled_costs_no_step_and_wakes_the_loop(
    length: int, bench: FailingBench, gate: Event
) -> None:
    bench.send(AddRequest("c", PROMPTS[0][:length], CONSTRAINED))
    for _ in range(30):
        bench.core.turn()
    prompt_steps = num_steps(bench)
    assert prompt_steps == (2 if length > 1 else 0), "the prompt but for its last token, 48 in a step"
    for _ in range(30):
        assert not bench.core.turn(), "the loop sleeps"
    assert num_steps(bench) == prompt_steps
    bench.mailbox.bell.clear()
    gate.set()
    assert bench.mailbox.bell.wait(60), "the end of the compilation wakes the loop"
    bench.run()
    assert [len(output) for output in bench.tokens.values()] == [6, 6]
    assert bench.stats is not None
    assert num_steps(bench) - prompt_steps <= 8 + bench.stats.counters["draws_sat_out_total"]


@pytest.mark.parametrize("bench", ["off", "on"], indirect=True)
def test_free_rows_go_on_beside_it(bench: FailingBench, gate: Event) -> None:
    bench.send(AddRequest("c", PROMPTS[0], CONSTRAINED))
    bench.send(AddRequest("f", PROMPTS[1], FREE))
    for _ in range(60):
        bench.core.turn()
    bench._collect()
    assert len(bench.tokens["f", 0]) == FREE.max_tokens
    assert num_steps(bench) <= FREE.max_tokens + 4
    gate.set()
    bench.run()
    assert len(bench.tokens["c", 1]) == 6


@pytest.mark.parametrize("bench", ["off", "on"], indirect=True)
@pytest.mark.parametrize("work", [Work.GENERATE, Work.PREFILL])
def test_a_grammar_that_is_never_compiled_ends_its_request_alone(
    work: Work, bench: FailingBench, gate: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.send(AddRequest("c", PROMPTS[0], CONSTRAINED, work))
    bench.send(AddRequest("f", PROMPTS[1], FREE))
    for _ in range(30):
        bench.core.turn()
    monkeypatch.setattr(unready, "UNREADY_DEADLINE_S", 0.0)
    bench.run()
    assert bench.failed.keys() == {"c"}
    assert bench.failed["c"].error == Overloaded.__name__, "503: it may be asked again"
    assert "was not computed within" in bench.failed["c"].message
    assert len(bench.tokens["f", 0]) == FREE.max_tokens
