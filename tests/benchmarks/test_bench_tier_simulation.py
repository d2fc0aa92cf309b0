"""What the simulated tiers find of a trace with hits that are known."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.routing_simulation.trace import BLOCK_TOKENS, read_trace
from benchmarks.tier_simulation import GROUP, layout_of, main, simulate_tiers
from pd_cluster.engine import disk_tier
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

ROUND, LONG = 40, 1  # prompts, and blocks of the trace in each
GIB = 2**30
PROMPT_BYTES = LONG * BLOCK_TOKENS // GROUP.block_size * GROUP.block_bytes


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty prompts, one after the other, three times: a cache that has fewer of them finds none again."""
    rows = [
        {
            "timestamp": 1000 * (ROUND * turn + number), "input_length": LONG * BLOCK_TOKENS + 9, "output_length": 1,
            "hash_ids": [LONG * number + k for k in range(LONG + 1)],
        }
        for turn in range(3) for number in range(ROUND)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_each_tier_finds_what_fits_into_it(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = read_trace(trace)
    gpu_gib, all_gb, few_gb = 12 * PROMPT_BYTES / GIB, 50 * PROMPT_BYTES / 1e9, 12 * PROMPT_BYTES / 1e9
    most = 2 / 3 * LONG * BLOCK_TOKENS / (LONG * BLOCK_TOKENS + 9)
    alone = simulate_tiers(requests, 0, gpu_gib, 1.0)
    assert alone.hits == alone.host_hits == alone.saved_s == 0
    host = simulate_tiers(requests, all_gb, gpu_gib, 1.0)
    assert host.hits == pytest.approx(most)
    assert host.host_hits == pytest.approx(most)
    assert host.mean_ttft_s < alone.mean_ttft_s
    assert host.unsaved_blocks == 0
    few = simulate_tiers(requests, few_gb, gpu_gib, 1.0)
    assert few.hits < most / 2
    slow = simulate_tiers(requests, few_gb, gpu_gib, 1.0, disk_gb=100, disk_gb_s=2)
    assert slow.hits == few.hits  # an idle node computes 512 tokens sooner
    monkeypatch.setattr(disk_tier, "DISK_GB_S", 20.0)
    disk = simulate_tiers(requests, few_gb, gpu_gib, 1.0, disk_gb=100, disk_gb_s=20)
    assert disk.hits > 0.9 * most


def test_rows_are_recorded(trace: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    flags = ["--data", str(trace.parent), "--traces", trace.name, "--host-gb", "0", "5", "--gpu-gib", "1"]
    assert main([*flags, "--disk-gb", "9", "--json", str(record)]) == 0
    rows = [json.loads(line)["figures"] for line in record.read_text().splitlines()]
    assert [(row["host_gb"], row["disk_gb"]) for row in rows] == [(0, 0), (5, 0), (5, 9)]


def test_a_small_cache_saves_what_long_prompts_evict(tmp_path: Path) -> None:
    """Ninety-six blocks, of which each prompt takes thirty-three at once and writes most of them in its first step."""
    rows = [
        {"timestamp": 200 * number, "input_length": 2121, "output_length": 1,
         "hash_ids": [10 * (number % 8) + k for k in range(5)]}
        for number in range(24)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = simulate_tiers(read_trace(path), 400 * GROUP.block_bytes / 1e9, 96 * GROUP.block_bytes / GIB, 1.0)
    assert found.hits == pytest.approx(2 / 3 * 2048 / 2121)
    assert found.unsaved_blocks == 0


NEXT = "qwen3-next-80b-fp8"


def test_a_turn_finds_the_state_at_the_end_of_the_turn_before(tmp_path: Path) -> None:
    """Each turn has the whole blocks of the last one and two more, and a rest of its own, of which nothing is found."""
    rows = [
        {"timestamp": 2000 * turn, "input_length": (2 * turn + 2) * BLOCK_TOKENS + 100, "output_length": 1,
         "hash_ids": list(range(2 * turn + 3))}
        for turn in range(4)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = simulate_tiers(read_trace(path), 0, 2.0, 1.0, layout=layout_of(NEXT))
    assert found.hits == (2 + 4 + 6) * BLOCK_TOKENS / sum(row["input_length"] for row in rows)  # type: ignore[misc]


def test_files_are_simulated_with_one_group(trace: Path) -> None:
    with pytest.raises(StartupError, match="has several"):
        main(["--data", str(trace.parent), "--traces", trace.name, "--shape", NEXT, "--disk-gb", "9"])
