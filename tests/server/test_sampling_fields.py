"""API fields to SamplingParams and back; the model's own defaults."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.errors import InvalidRequest, StartupError
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.sampling import SamplingDefaults, api_fields, sampling_params
from pd_cluster.server.schema import CompletionBody, decode_body

if TYPE_CHECKING:
    from pathlib import Path

UNIT = st.floats(0, 1, allow_nan=False)
ANY_SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    n=st.integers(1, 8),
    temperature=st.floats(0, 2),
    top_p=UNIT,
    top_k=st.integers(0, 100),
    min_p=UNIT,
    repetition_penalty=st.floats(0.1, 2),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.dictionaries(st.integers(0, 100), st.floats(-100, 100), max_size=3),
    min_tokens=st.integers(0, 9),
    stop_token_ids=st.lists(st.integers(0, 100), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)


@given(ANY_SAMPLING)
def test_what_d_sends_to_p_means_the_same_there(sampling: SamplingParams) -> None:
    raw = json.dumps(api_fields(sampling) | {"prompt": [1], "max_tokens": 1}).encode()
    body, unknown = decode_body(raw, CompletionBody)
    other_defaults = SamplingDefaults(temperature=0.1, top_p=0.2, top_k=3, min_p=0.4, repetition_penalty=1.5)
    again = sampling_params(body, other_defaults, logprobs=body.logprobs, num_prompt_tokens=1, max_model_len=10)
    assert again == sampling
    assert again.first_token_digest == sampling.first_token_digest
    assert unknown == set()


def test_every_sampling_field_has_an_api_field() -> None:
    names = set(SamplingParams.__struct_fields__)
    assert set(api_fields(SamplingParams(max_tokens=1))) == names - {"max_tokens"}


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
    sampling = sampling_params(body, defaults, logprobs=None, num_prompt_tokens=2, max_model_len=10)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.6, 0.5, 20, 8)


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": "hot"}'])
def test_unreadable_generation_config_is_a_startup_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(StartupError, match="generation_config"):
        SamplingDefaults.load(tmp_path)


class _Body(CompletionBody, kw_only=True):
    prompt: int  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_a_list_that_takes_long_to_decode_is_refused_before(name: str) -> None:
    """Of a body of 64 MB, decoding it took 0.6 s, in which the node answered nobody."""
    value = {str(token): 1.0 for token in range(700_000)} if name == "logit_bias" else list(range(1_300_000))
    with pytest.raises(InvalidRequest) as caught:
        decode_body(json.dumps({"prompt": "a", name: value}).encode(), CompletionBody)
    assert caught.value.param == name


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
