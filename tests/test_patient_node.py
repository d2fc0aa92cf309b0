"""Patient nodes give all that the product judges by silence as long."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pytest

from pd_cluster.config import ModelConfig, NodeConfig
from pd_cluster.engine.step_timing import StepForecast
from pd_cluster.worker.ranks import Ranks
from tests.patient_node import PATIENCE_S, be_patient

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def product_again() -> Iterator[None]:
    yield
    mock.patch.stopall()


def test_a_rank_and_its_steps_get_as_long_as_an_engine() -> None:
    forecast = StepForecast(is_compiled_lazily=False)
    for _ in range(2):
        forecast.note_step(1, 0.01)
    assert forecast.deadline_s(1) < PATIENCE_S
    be_patient()
    assert forecast.deadline_s(1) == PATIENCE_S
    assert Ranks(NodeConfig(model=ModelConfig(tp=2)), "ipc://none", print).link._serving_silence_s == PATIENCE_S
