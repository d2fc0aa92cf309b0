"""Step tables of shapes with steps that were fitted to records (`device.py`), where no table was measured.

`python -m benchmarks slo --write-tables DIR` writes them. A measured one (`pd-cluster step-table`) takes their place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.slo.device import DEVICES
from pd_cluster.planning.step_table import StepPoint, StepTable, TableFlags, TableModel
from pd_cluster.planning.table_points import planned_points
from pd_cluster.scheduling.step_model import StepWork, keys_of

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.planning.table_points import PlannedPoint

# By shape and ranks: name of the file, blocks of 64 tokens that an H200 had room for, the model, and what was fitted.
# Steps with prompts of two ranks were not measured, so there is no table of them; of 8B it was measured.
SOURCES = {
    ("30b-a3b-fp8", 1): (
        "30b-a3b-fp8-h200-tp1", 15_903,
        TableModel("30b-a3b-fp8", "Qwen3MoeForCausalLM", "", 32, 4, "float8", "bfloat16", 31.0e9),
        "fitted: benchmarks/results/engine_gpu.jsonl (30b-a3b-fp8, 4b0b2b01) and traces of two served workloads",
    ),
}  # fmt: skip
CARD = "NVIDIA H200"


def fitted_table(shape: str, num_ranks: int) -> StepTable:
    device = DEVICES[shape, num_ranks]
    _, num_blocks, model, source = SOURCES[shape, num_ranks]

    def measured(point: PlannedPoint) -> StepPoint:
        num, tokens = point.num_decodes, point.num_tokens
        work = StepWork(num, num * point.context, tokens, keys_of(tokens, point.before))
        ms = 1e3 * device.seconds(work)
        return StepPoint(*point[:4], round(ms, 4))  # the heat of a device was not measured with it

    points = planned_points(device.max_seqs, device.step_tokens, 1 << 17)
    flags = TableFlags(device.max_seqs, device.step_tokens, device.block_size, num_blocks, 1 << 17)
    return StepTable(CARD, model, num_ranks, {"torch": "2.11.0"}, flags, source, tuple(map(measured, points)))


def write_tables(directory: Path) -> None:
    for (shape, num_ranks), (name, *_) in SOURCES.items():
        (directory / f"{name}.json").write_bytes(fitted_table(shape, num_ranks).to_json())
