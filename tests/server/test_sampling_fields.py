"""API fields to SamplingParams; the model's own defaults."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_cluster.errors import InvalidRequest, StartupError
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.bodies.schema import CompletionBody
from pd_cluster.server.params.sampling import (
    SamplingDefaults,
    sampling_params,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_generation_config_sets_the_defaults(tmp_path: Path) -> None:
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults()
    given_values = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "do_sample": True,
        "eos_token_id": [1, 2],
        "min_p": None,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(given_values))
    defaults = SamplingDefaults.load(tmp_path)
    assert defaults == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    body = msgspec.convert({"prompt": 1, "top_p": 0.5}, type=_Body)
    sampling = sampling_params(body, defaults, logprobs=None, num_prompt_tokens=2, max_model_len=10, vocab_size=10)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.6, 0.5, 20, 8)


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": "hot"}'])
def test_unreadable_generation_config_is_a_startup_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(StartupError, match="generation_config"):
        SamplingDefaults.load(tmp_path)


class _Body(CompletionBody, kw_only=True):
    prompt: int  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"logit_bias": {5: 1.0, 100: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0, 5: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: 1.0, 6: 100.5}}, "logit_bias"),
        ({"logit_bias": {5: -101.0, 6: 0.0}}, "logit_bias"),
        ({"logit_bias": {5: 1.0, 6: float("nan")}}, "logit_bias"),
        ({"logit_bias": {5: float("inf"), 6: float("-inf")}}, "logit_bias"),
        ({"stop_token_ids": (5, 100)}, "stop_token_ids"),
        ({"stop_token_ids": (5, -1)}, "stop_token_ids"),
    ],
)
def test_lists_of_tokens_are_checked(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(max_tokens=1, **settings).validate(vocab_size=100)
    assert caught.value.param == param
    SamplingParams(max_tokens=1, logit_bias={0: -100.0, 99: 100.0}, stop_token_ids=(0, 99)).validate(vocab_size=100)
