"""The parts of the tier's benchmark that need no GPU, on a tiny model."""

from __future__ import annotations

import json
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import tier_bench
from benchmarks.__main__ import main
from benchmarks.offline import DirectMailbox
from benchmarks.routing_simulation.trace import BLOCK_TOKENS, synthetic
from benchmarks.tier_bench import TierBench
from benchmarks.tier_trace import simulated_hits
from pd_cluster.protocol.messages import EngineStats, KvStats
from pd_cluster.scheduling.host_copies import HostCopies

if TYPE_CHECKING:
    from pathlib import Path

FLAGS = (
    "tier --parts hits --device cpu --shape tiny --num-blocks 150 --host-gb 0.02 "
    "--prompt 128 --context 16 --most-tokens 80 --repeats 1"
)
# Of five prompts of 128 tokens, 7 more each: all but the last token, in blocks of 16
NUM_WHOLE = 112 + 128 + 128 + 144 + 144


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_bench, "QUIET_TOKENS", 10)
    monkeypatch.setattr(tier_bench, "BESIDE_TOKENS", 2)


def measured(path: Path) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    """-> the status, the record, its rows by name."""
    status = main([*FLAGS.split(), "--json", str(path)])
    record = json.loads(path.read_text())
    return status, record, {row["name"]: row for row in record["results"]}


def test_hits_and_gaps_are_recorded(tmp_path: Path) -> None:
    status, record, rows = measured(tmp_path / "record")
    assert (status, record["faults"]) == (0, [])
    assert len(rows["TTFT of 128, hit in the host"]["ms"]) == 5
    assert rows["TTFT of 128, computed"]["counters"]["prefix_cache_hit_tokens_total"] == 0
    on_device = rows["TTFT of 128, hit on the device"]["counters"]
    assert on_device["prefix_cache_hit_tokens_total"] == NUM_WHOLE
    assert on_device["host_cache_hit_tokens_total"] == 0
    assert rows["TTFT of 128, hit in the host"]["counters"]["host_cache_hit_tokens_total"] == NUM_WHOLE
    assert rows["16 streams, prompts of 128 load"]["gap_max_ms"] > 0
    assert rows["answers of hits in the host"]["equal"]["hit on the device"], "with NaN in blocks not written"


def test_a_miss_in_the_host_and_another_answer_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers as if the host's blocks had other content."""
    answers, rounds = TierBench._answers, list[int]()

    def bent(self: TierBench, *arguments: Any) -> tuple[list[float], list[list[int]]]:
        rounds.append(len(rounds))
        times, found = answers(self, *arguments)
        return times, [tokens[:-1] for tokens in found] if len(rounds) == 3 else found

    monkeypatch.setattr(TierBench, "_answers", bent)
    monkeypatch.setattr(tier_bench, "no_wait", lambda *_, **__: inf)
    status, record, _ = measured(tmp_path / "record")
    assert status == 1
    assert record["faults"] == [
        f"hit in the host: 0 of {NUM_WHOLE} tokens in whole blocks",
        "answers after hits on the device and in the host differ",
    ]


def trace_file(path: Path, num_requests: int) -> Path:
    """Conversations of one to a dozen blocks, as Mooncake's."""
    rows = [
        {
            "timestamp": one.at_s * 1e3, "input_length": one.num_tokens, "output_length": 1,
            "hash_ids": [*one.blocks, -1][: -(-one.num_tokens // BLOCK_TOKENS)],
        }
        for one in synthetic(num_requests, Random(1))
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


LIVE = (
    "tier --parts live --device cpu --shape tiny --num-blocks 100 --block-size 16 --host-gb 0.0015 --requests 60 "
    "--open 1"
)


@pytest.mark.parametrize("points_more", [0, 10])
def test_a_trace_finds_what_its_simulation_finds(
    points_more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the benchmark fails: with a simulation that finds ten points more in host memory."""

    def simulated(*arguments: Any) -> list[float]:
        both, host = simulated_hits(*arguments)
        return [both, host + points_more / 100]

    monkeypatch.setattr(tier_bench, "simulated_hits", simulated)
    monkeypatch.setattr(HostCopies, "load_s", lambda *_, **__: 0.0)  # computing is as dear for both
    trace, record = trace_file(tmp_path / "trace.jsonl", 80), tmp_path / "record"
    status = main([*LIVE.split(), "--trace", str(trace), "--json", str(record)])
    found = json.loads(record.read_text())
    (row,) = found["results"]
    assert (row["prompts"], bool(found["faults"]), status) == (60, points_more > 0, int(points_more > 0))
    assert row["live_host"] > 0.05, "the tier has a part of it"
    assert row["live"] > row["live_host"], "and the device the rest"


def test_counters_outlast_a_client_that_drops_them() -> None:
    """An engine sends them when they change: a whole trace on a GPU had found nothing."""
    mailbox = DirectMailbox()
    mailbox.send(EngineStats(KvStats(1, 1, 0, 0, 0, 0), 0, 0, 0, {"hits": 3.0}, {}))
    mailbox.outbox = []
    assert mailbox.counters == {"hits": 3.0}
