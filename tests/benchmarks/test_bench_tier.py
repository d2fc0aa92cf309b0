"""The parts of the tier's benchmark that need no GPU, on a tiny model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path

FLAGS = (
    "tier --parts hits --device cpu --shape tiny --num-blocks 400 --host-gb 0.02 "
    "--prompt 256 --context 16 --most-tokens 330 --repeats 1"
)


def test_hits_and_gaps_are_recorded(tmp_path: Path) -> None:
    assert main([*FLAGS.split(), "--json", str(tmp_path / "record")]) == 0
    record = json.loads((tmp_path / "record").read_text())
    rows = {row["name"]: row for row in record["results"]}
    assert len(rows["TTFT of 256, hit in the host"]["ms"]) == 5
    assert rows["16 streams, prompts of 256 load"]["gap_max_ms"] > 0
    assert all(rows["answers of hits in the host"]["equal"].values()), "with NaN in blocks that were not written"
