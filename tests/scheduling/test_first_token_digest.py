"""Which sampling parameters decide a first token: all of them, unless they are named with a reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pd_cluster.engine.redraw import sampling_digest
from pd_cluster.protocol.sampling_params import NOT_OF_FIRST_TOKENS, BeamParams, SamplingParams

# every field, with values that differ from each other and from the default
OTHERS: dict[str, tuple[Any, Any]] = {
    "max_tokens": (2, 3),
    "n": (2, 3),
    "temperature": (0.0, 0.5),
    "top_p": (0.5, 0.6),
    "top_k": (1, 2),
    "min_p": (0.1, 0.2),
    "repetition_penalty": (1.1, 1.2),
    "presence_penalty": (0.1, -0.1),
    "frequency_penalty": (0.1, -0.1),
    "seed": (0, 1),
    "logit_bias": ({5: 1.0}, {5: 1.0, 6: 1.0}),
    "allowed_token_ids": ((5,), (5, 6)),
    "bad_words": (((5,),), ((5, 6), (7,))),
    "min_tokens": (1, 2),
    "stop_token_ids": ((5,), (5, 6)),
    "ignore_eos": (True, True),
    "grammar": ('start: "a"', 'start: "b"'),
    "logits_args": ({"ban": 7}, {"ban": 8}),
    "logprobs": (0, 1),
    "beams": (BeamParams(width=2), BeamParams(width=3)),
}
DEFAULT = SamplingParams(max_tokens=1)


def test_every_field_has_a_case() -> None:
    """A field that is new here needs one in tests/integration/test_first_token.py, too."""
    assert OTHERS.keys() == set(SamplingParams.__struct_fields__)
    assert NOT_OF_FIRST_TOKENS.keys() <= OTHERS.keys()
    assert all(NOT_OF_FIRST_TOKENS.values()), "each with its reason"


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_that_differs_is_seen(name: str) -> None:
    one, other = (msgspec.structs.replace(DEFAULT, **{name: value}) for value in OTHERS[name])
    digests = {DEFAULT.first_token_digest, one.first_token_digest, other.first_token_digest}
    num_distinct = len(digests - {DEFAULT.first_token_digest})
    assert num_distinct == (0 if name in NOT_OF_FIRST_TOKENS else 1 if one == other else 2)


def test_no_two_fields_are_taken_for_each_other() -> None:
    changed = [msgspec.structs.replace(DEFAULT, **{name: values[0]}) for name, values in OTHERS.items()]
    decisive = [one for one, name in zip(changed, OTHERS, strict=True) if name not in NOT_OF_FIRST_TOKENS]
    assert len({one.first_token_digest for one in decisive}) == len(decisive)


def test_the_same_said_otherwise_is_the_same() -> None:
    """The digest is P's on one node and D's on another: neither order nor an encoding between them matters."""
    some = SamplingParams(max_tokens=1, temperature=1, logit_bias={5: 1.0, 6: 2.0}, stop_token_ids=(3,), seed=2**63 - 1)
    other = SamplingParams(max_tokens=9, seed=2**63 - 1, stop_token_ids=(3,), logit_bias={6: 2.0, 5: 1.0})
    assert some.first_token_digest == other.first_token_digest
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(some), type=SamplingParams)
    assert sent.first_token_digest == some.first_token_digest


def test_nodes_with_other_logits_stages_sample_other_first_tokens() -> None:
    digests = [sampling_digest(DEFAULT, stages) for stages in ((), ("a:A",), ("b:B",), ("a:A", "b:B"))]
    assert digests[0] == DEFAULT.first_token_digest
    assert len(set(digests)) == len(digests)
