"""The fields of a beam search: what they become, and which others exclude it.

Beams are ranked by the model's own distribution, so whatever would change that, or draw from it, is refused. Defaults
of the model (`generation_config.json`) do not count. A seed has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pd_cluster.errors import InvalidRequest
from pd_cluster.protocol.sampling_params import BeamParams, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.server.bodies.schema import GenerationBody

# Fields beside which a search is possible only with these values: they ask for nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "min_tokens": (None, 0),
    "stop": (None, []),
    "logits_args": (None, {}),
}
_ONLY_OF_BEAMS = ("length_penalty", "early_stopping")


def check_beam_fields(body: GenerationBody) -> None:
    """Raises InvalidRequest for a field that a beam search cannot honour."""
    if not body.use_beam_search:
        return
    for name, values in _NEUTRAL.items():
        if getattr(body, name) not in values:
            raise InvalidRequest(f"{name} excludes use_beam_search", name, "unsupported_value")


def check_beam_choice(grammar: str, logits_stages: Sequence[str]) -> None:
    """Raises InvalidRequest for a beam search if something else decides its tokens too. `grammar`: of the answer."""
    if grammar:
        raise InvalidRequest(
            "use_beam_search excludes structured output and tool calls that are required", "use_beam_search"
        )
    if logits_stages:
        raise InvalidRequest("use_beam_search: this node has a --logits-stage, which beams ignore", "use_beam_search")


def with_beams(sampling: SamplingParams, body: GenerationBody) -> SamplingParams:
    """The parameters of the body's beam search."""
    beams = BeamParams(
        width=sampling.n if body.best_of is None else body.best_of,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=False if body.early_stopping is None else body.early_stopping,
    )
    return msgspec.structs.replace(
        sampling, beams=beams, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0
    )


def unread_beam_fields(body: GenerationBody) -> set[str]:
    """Fields of beam searches in a request that asks for none."""
    return set() if body.use_beam_search else {name for name in _ONLY_OF_BEAMS if getattr(body, name) is not None}
