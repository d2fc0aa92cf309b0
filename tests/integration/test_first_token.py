"""The first token belongs to its sampling: D shows P's only when P sampled as D would have."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from pd_cluster.protocol.sampling_params import NOT_OF_FIRST_TOKENS, SamplingParams
from tests.integration.foreign import COMPLETIONS, num_redraws, two_legs
from tests.integration.system import Answer, Path, System
from tests.integration.test_sampling_parity import EOS, STORY, same_numbers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

# With this seed each of the limits below changes the first token.
BASE: dict[str, Any] = {"prompt": STORY, "max_tokens": 5, "temperature": 2.0, "seed": 6, "ignore_eos": True,
                        "logprobs": 1}  # fmt: skip
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
GREEDY: dict[str, Any] = {"temperature": 0, "min_tokens": 1}
# every field of SamplingParams: what both legs have beside BASE, and values for the legs to differ in
CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "max_tokens": ({}, [2, 5]),
    "n": ({}, [1, 2, 3]),
    "temperature": ({}, [0, 0.7, 2.0]),
    "top_p": ({}, [1.0, 0.3, 0.05]),
    "top_k": ({}, [0, 2]),
    "min_p": ({}, [0, 0.5]),
    "repetition_penalty": ({}, [1.0, 0.2]),
    "presence_penalty": ({}, [0, 2.0]),
    "frequency_penalty": ({}, [0, 2.0]),
    "seed": ({}, [6, 1]),
    "logit_bias": ({}, [{}, {"1000": 100}, {"1001": 100}]),
    "allowed_token_ids": ({"logit_bias": {"1000": 100, "1001": 90}}, [None, [1001], [1002]]),
    "bad_words": ({"temperature": 0, "logit_bias": {"263": 100, "1228": 90, "643": 80}}, [[], ["the"], ["the", "boy"]]),
    "min_tokens": ({"temperature": 0, "ignore_eos": False, "logit_bias": {str(EOS): 100}}, [0, 3]),
    "stop_token_ids": (GREEDY | {"logit_bias": {"77": 100}}, [[], [77]]),
    "ignore_eos": (GREEDY | {"logit_bias": {str(EOS): 100}}, [False, True]),
    "grammar": ({}, [None, {"choice": ["1", "3"]}, {"choice": ["2"]}]),
    "logits_args": ({"logit_bias": {"1000": 100}}, [{}, {"ban": 1000}]),
    "logprobs": ({}, [None, 0, 3]),
}
BODY_FIELDS = {"grammar": "structured_outputs"}  # for fields that bodies call otherwise
# these do not change the first token here: more sequences, an empty output, its logprobs
SAME_TOKEN = {"max_tokens", "n", "presence_penalty", "frequency_penalty", "logprobs"}


@pytest.fixture
def system(system_with_mixed: System) -> System:
    return system_with_mixed


def check_same(ours: Answer, theirs: Answer) -> None:
    """The same texts, ends, logprobs and counts."""
    assert len(ours.choices) == len(theirs.choices)
    for one, other in zip(ours.choices, theirs.choices, strict=True):
        for name in ("index", "text", "finish_reason", "stop_reason"):
            assert one.get(name) == other.get(name), name
        same_numbers(one.get("logprobs"), other.get("logprobs"))
    assert ours.body["usage"] | {"prompt_tokens_details": None} == theirs.body["usage"] | {
        "prompt_tokens_details": None
    }


def test_every_field_has_a_case() -> None:
    """`beams` has its own: tests/integration/test_beam_searches.py. These nodes have a logits stage."""
    assert CASES.keys() | {"beams"} == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", CASES)
def test_legs_that_differ_get_what_d_asked_for(name: str, system: System) -> None:
    if name == "grammar":
        pytest.importorskip("llguidance")
    more, values = CASES[name]
    bodies = [BASE | more | {BODY_FIELDS.get(name, name): value} for value in values]
    mixed = system.ask_node_all("mixed", [(COMPLETIONS, body) for body in bodies])
    if name not in SAME_TOKEN:
        firsts = [answer.choices[0]["logprobs"]["tokens"][0] for answer in mixed]
        assert len(set(firsts)) == len(firsts), "P's token would do as well"
    pairs = list(permutations(range(len(values)), 2))
    legs = []
    for salt, (on_p, on_d) in enumerate(pairs):
        salted = {"cache_salt": f"{name} {salt}"}
        legs.append((bodies[on_p] | salted, bodies[on_d] | salted | (STREAM if salt % 2 else {})))
    before = num_redraws(system)
    for (_, answer), (_, on_d) in zip(two_legs(system, legs), pairs, strict=True):
        assert answer.headers["x-pd-prefill"] == "prefill", "the KV is P's"
        check_same(answer, mixed[on_d])
    assert num_redraws(system) - before == (0 if name in NOT_OF_FIRST_TOKENS else len(pairs))


@pytest.mark.parametrize("length", [16, 31, 32])
def test_a_d_that_has_all_of_the_prompt_cached(length: int, system: System) -> None:
    body = BASE | {"prompt": list(range(70, 70 + length)), "cache_salt": "warm"}
    mixed = system.ask_node("mixed", COMPLETIONS, body)
    system.ask_node("decode", COMPLETIONS, body)
    for _ in range(2):
        before = num_redraws(system)
        [(_, answer)] = two_legs(system, [(body | {"temperature": 0}, body)])
        check_same(answer, mixed)
        assert num_redraws(system) - before == 1
    check_same(system.ask_node("decode", COMPLETIONS, body), mixed)


def test_equal_legs_take_the_token_of_p(system: System) -> None:
    """Without a seed no two draws are the same: the token can only be P's."""
    bodies: list[dict[str, Any]] = [BASE | {"seed": None, "cache_salt": f"equal {i}"} for i in range(8)]
    before = num_redraws(system), num_redraws(system, "no_digest")
    shown = set()
    for on_p, on_d in two_legs(system, [(body | {"max_tokens": 1}, body) for body in bodies]):
        first = on_p.choices[0]["text"]
        assert on_d.choices[0]["text"].startswith(first)
        shown.add(first)
    assert len(shown) > 1
    assert (num_redraws(system), num_redraws(system, "no_digest")) == before


@pytest.mark.parametrize("path", [Path.P_FIRST, Path.D_FIRST])
def test_our_own_router_never_makes_the_legs_differ(path: Path, system: System) -> None:
    before = num_redraws(system), num_redraws(system, "no_digest")
    chat = {"messages": [{"role": "user", "content": STORY}], "logprobs": True, "top_logprobs": 2, "temperature": 0.5}
    settings: list[dict[str, Any]] = [
        {}, {"seed": None, "n": 2}, {"logit_bias": {"70": 3, "80": -2.5}}, {"min_tokens": 3, "ignore_eos": False},
        {"top_p": 0.9, "top_k": -1, "min_p": 0.01}, {"stop_token_ids": [9, 7]}, {"presence_penalty": 1, "seed": -1},
    ]  # fmt: skip
    requests = [(COMPLETIONS, BASE | more | {"cache_salt": f"{path} {i}"}) for i, more in enumerate(settings)]
    requests += [("/v1/chat/completions", chat | {"max_tokens": limit, "cache_salt": str(path)}) for limit in (1, 4)]
    for answer in system.ask_all(path, requests):
        assert answer.headers["x-pd-prefill"] == "prefill"
    assert (num_redraws(system), num_redraws(system, "no_digest")) == before


def test_several_prompts_of_a_foreign_router_are_answered(system: System) -> None:
    body = BASE | {"prompt": [STORY, "It was cold and", "One"], "n": 2, "temperature": 0}
    [(on_p, on_d)] = two_legs(system, [(body | {"max_tokens": 1}, body)])
    assert "kv_transfer_params" not in on_p.body
    assert on_d.headers["x-pd-prefill"] == "decode"
    check_same(on_d, system.ask_node("mixed", COMPLETIONS, body))


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", [Path.P_FIRST, Path.D_FIRST])
@pytest.mark.parametrize("stream", [False, True])
def test_ignored_fields_are_named_through_the_router(path: Path, stream: bool, system: System) -> None:
    body = BASE | {"stream": stream, "verbosity": "low", "x\r\ny": 1}
    assert system.ask(path, COMPLETIONS, body).headers["x-pd-ignored"] == "verbosity,x??y"
