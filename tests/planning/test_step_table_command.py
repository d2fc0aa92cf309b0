"""`pd-cluster step-table` over the demo model on a CPU: the file is a table of this model that a plan reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_cluster.launch.cli import main
from pd_cluster.planning.step_table import read_table
from pd_cluster.planning.table_points import planned_points
from pd_cluster.scheduling.step_model import StepWork

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
def test_a_table_of_the_demo_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo.json"
    flags = ["--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--max-model-len", "256", "--num-threads", "1"]
    assert (
        main(["step-table", "--model", "pd_cluster/demo_model", "--out", str(out), "--kv-cache-gb", "0.05", *flags])
        == 0
    )
    table = read_table(out.read_bytes(), "demo.json")
    assert [point[:4] for point in table.points] == [point[:4] for point in planned_points(4, 128, 256)]
    assert (table.model.name, table.tp, table.flags.max_num_seqs, table.flags.block_size) == ("demo_model", 1, 4, 16)
    assert table.model.fingerprint
    assert table.device.seconds(StepWork(2, 200)) > 0
    assert "beside" in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_refused_before_the_model_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step-table", "--model", "nowhere", "--out", "/nowhere/x.json"]) == 2
    assert "there is no directory /nowhere" in capsys.readouterr().err
