"""A model that cannot be split over the ranks. In a file of its own: a process is in one group of ranks at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_cluster.config import ModelConfig, NodeConfig
from pd_cluster.errors import StartupError
from pd_cluster.worker.device_executor import DeviceDescribed
from pd_cluster.worker.ranks import Ranks
from tests.deadlines import HANG_S
from tests.shallow_model import shallow_model
from tests.worker.forked_ranks import forked_ranks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.integration
def test_a_model_that_cannot_be_split(tmp_path: Path) -> None:
    """Rank 0 says why, and the other ranks end."""
    config = NodeConfig(model=ModelConfig(model=shallow_model(), device="cpu", dtype="float32", tp=3, num_threads=1))
    ranks = Ranks(config, f"ipc://{tmp_path}/r", lambda _: None)
    with forked_ranks(), pytest.raises(StartupError, match="--tp 3: 4 KV heads cannot be split"):
        DeviceDescribed.over(ranks, lambda _: None)
    others = ranks.link._processes
    assert [*others] == [1, 2]
    for process in others.values():
        process.wait(HANG_S)
