"""Defaults of generation_config.json: each that is taken can be sent by a request, and others are refused at start."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.config import ModelConfig, NodeConfig
from pd_cluster.errors import StartupError
from pd_cluster.launch.model_path import DEMO_MODEL
from pd_cluster.launch.preflight import model_problems
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.params.sampling import SamplingDefaults

if TYPE_CHECKING:
    from pathlib import Path


def written(directory: Path, values: dict[str, Any]) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("values", "defaults"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": None, "top_p": None, "top_k": None, "min_p": None}, SamplingDefaults()),
        ({"top_k": 0}, SamplingDefaults()),
        ({"top_k": -1}, SamplingDefaults()),
        ({"top_k": 50.0, "temperature": 1}, SamplingDefaults(top_k=50)),
        ({"temperature": 0}, SamplingDefaults(temperature=0.0)),
        ({"temperature": 0.0, "do_sample": True}, SamplingDefaults(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, SamplingDefaults(temperature=0.0, top_p=0.9)),
        ({"do_sample": False, "top_p": 0.5, "top_k": 50}, SamplingDefaults(temperature=0.0, top_p=0.5, top_k=50)),
        ({"do_sample": False, "min_p": 0.1}, SamplingDefaults(temperature=0.0, min_p=0.1)),
        ({"do_sample": False, "repetition_penalty": 1.1}, SamplingDefaults(repetition_penalty=1.1)),
        ({"do_sample": False}, SamplingDefaults()),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, SamplingDefaults(top_k=64, top_p=0.95)),
        ({"top_p": 0}, SamplingDefaults(top_k=1)),
        ({"top_p": 0.0, "top_k": 20}, SamplingDefaults(top_k=1)),
        ({"repetition_penalty": 1.05, "temperature": 0.7}, SamplingDefaults(repetition_penalty=1.05, temperature=0.7)),
        ({"max_new_tokens": 2048, "num_beams": 1, "typical_p": 1.0, "pad_token_id": -1}, SamplingDefaults()),
    ],
)
def test_what_is_meant_is_taken(tmp_path: Path, values: dict[str, Any], defaults: SamplingDefaults) -> None:
    found = SamplingDefaults.load(written(tmp_path, values))
    assert found == defaults
    SamplingParams(
        max_tokens=1, temperature=found.temperature, top_p=found.top_p, top_k=found.top_k, min_p=found.min_p,
        repetition_penalty=found.repetition_penalty,
    ).validate(10)  # fmt: skip
    assert type(found.top_k) is int
    assert "\n" not in found.line


@pytest.mark.long_cases
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -0.5}, "temperature must be between 0 and 2, not -0.5"),
        ({"temperature": 2.5}, "temperature must be between 0 and 2, not 2.5"),
        ({"temperature": float("nan")}, "temperature must be between 0 and 2, not nan"),
        ({"temperature": float("inf")}, "temperature must be between 0 and 2, not inf"),
        ({"temperature": 10**400}, "int too large"),
        ({"temperature": "0.7"}, "temperature must be a number, not '0.7'"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"temperature": [0.7]}, "temperature must be a number"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1, not 1.5"),
        ({"top_p": -1}, "top_p must be between 0 and 1, not -1"),
        ({"top_k": -5}, "top_k must be between 0 and"),
        ({"top_k": 20.5}, "top_k must be an integer, not 20.5"),
        ({"min_p": 2}, "min_p must be between 0 and 1, not 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be between 0 and 10, not -1"),
        ({"repetition_penalty": 11.0}, "repetition_penalty must be between 0 and 10, not 11"),
    ],
)
def test_what_no_request_could_send_is_refused_at_start(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError, match=r"generation_config\.json: ") as caught:
        SamplingDefaults.load(written(tmp_path, values))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    [problem] = model_problems(NodeConfig(model=ModelConfig(generation_config=str(tmp_path))), DEMO_MODEL)
    assert says in problem
    assert list(model_problems(NodeConfig(model=ModelConfig(generation_config="none")), DEMO_MODEL)) == []
