"""The presets' arrivals, from small traces."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.presets import AZURE_FILE, MOONCAKE_FILE, PRESETS
from tests.launch.test_bench_workload import AZURE

if TYPE_CHECKING:
    from pathlib import Path


def test_presets_are_what_the_table_says(tmp_path: Path) -> None:
    (tmp_path / AZURE_FILE).write_text(AZURE)
    rows = [{"timestamp": at, "input_length": size, "output_length": 2000, "hash_ids": [0]}
            for at, size in enumerate((14_999, 15_000, 7))]  # fmt: skip
    (tmp_path / MOONCAKE_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = PRESETS["1024x256"].arrivals(tmp_path, 0)
    assert (len(fixed), {(row.num_input, row.num_output) for row in fixed}) == (400, {(1024, 256)})
    assert fixed[-1].at_s == pytest.approx(399 / 20, rel=0.2)
    azure = PRESETS["azure28"].arrivals(tmp_path, 0)
    assert [(row.num_input, row.num_output) for row in azure] == [(374, 44), (396, 109), (879, 55)]
    assert azure[-1].at_s == pytest.approx(2 / 28)
    mooncake = PRESETS["mooncake3"].arrivals(tmp_path, 0)
    assert [(row.num_input, row.num_output, row.prefix_blocks) for row in mooncake] == [
        (14_999, 1000, ()),
        (7, 1000, ()),
    ]


def test_more_gpus_get_more_requests_in_the_same_time(tmp_path: Path) -> None:
    once, twice = PRESETS["1024x256"], PRESETS["1024x256"].times(2)
    assert once.times(1) is once
    arrivals = twice.arrivals(tmp_path, 0)
    assert len(arrivals) == 800
    assert arrivals[-1].at_s == pytest.approx(once.arrivals(tmp_path, 0)[-1].at_s, rel=0.1)
    assert twice.title.endswith("20/s x 2")
    assert twice.peers == (), "they were measured on two GPUs"
