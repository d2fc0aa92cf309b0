"""A cluster tells what a request waited for, and the benchmark `handover` reads it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.__main__ import main
from pd_cluster.bench.statistics import HANDOVER_STEPS
from tests.integration.system import Path, System

if TYPE_CHECKING:
    import pathlib

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture
def system(shared_system: System) -> System:
    return shared_system


def timings(system: System, path: Path, num_tokens: int) -> dict[str, float]:
    body = {
        "prompt": list(range(num_tokens)), "cache_salt": f"{path} {num_tokens}", "max_tokens": 4, "temperature": 0,
        "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True, "include_timings": True},
    }  # fmt: skip
    usage: dict[str, Any] = system.ask(path, "/v1/completions", body).body["usage"]
    found: dict[str, float] = usage["timings"]
    return found


@pytest.mark.parametrize("path", [Path.P_FIRST, Path.D_FIRST])
def test_a_request_that_was_handed_over_tells_every_step(system: System, path: Path) -> None:
    timings(system, path, 40)  # the first one waits for the link
    found = timings(system, path, 600)
    assert set(found) == {
        "queue", "transfer", "admit", "first_decode", "prefill_leg", "prefill_queue", *HANDOVER_STEPS,
    }  # fmt: skip
    assert all(
        found[name] > 0 for name in ("queue", "transfer", "first_decode", "prefill_leg", "post", "link", "confirm")
    )
    steps_ms = sum(found[name] for name in HANDOVER_STEPS)
    assert steps_ms < found["queue"] + found["transfer"] + found["announce"], "they are parts of it"
    assert system.settled_metric("decode", 'pd_handover_step_seconds_count{step="link"}') >= 2


def test_a_request_that_was_not_handed_over_tells_its_prefill(system: System) -> None:
    assert set(timings(system, Path.MIXED, 40)) == {"queue", "prefill"}


def test_handovers_of_a_real_cluster(
    system: System, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    arguments = f"handover --url {system.router_url} --route p-first --tokens 200 --samples 4 --batches 0 4"
    status = main([*arguments.split(), "--every-s=0.05", "--vocab-size=2048", f"--json={out}"])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["batch"] for record in records] == [0, 4]
    for record in records:
        told = record["summary"]
        assert told["spreads"].get("handover", {}).get("count") == 4, (told["errors"], told["routes"], told["phases"])
    assert status == 0
    assert capsys.readouterr().out.count("= last announcement to schedulable") == 2
    system.settle()
