"""The two legs of a request as a foreign P-first router sends them: P's first, then D's with what P answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.integration.system import Answer, System

COMPLETIONS = "/v1/completions"
ASK_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}
REDRAWS = 'pd_first_token_redraws_total{reason="%s"}'


def two_legs(system: System, legs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[Answer, Answer]]:
    """P's and D's answers to (P's body, D's body), all at once on either node. What P does not hand over D computes."""
    to_p = [(COMPLETIONS, body | {"stream": False, "kv_transfer_params": ASK_FOR_KV}) for body, _ in legs]
    for_p = system.ask_node_all("prefill", to_p)
    to_d = []
    for answer, (_, body) in zip(for_p, legs, strict=True):
        params = answer.body.get("kv_transfer_params")
        to_d.append((COMPLETIONS, body if params is None else body | {"kv_transfer_params": params}))
    return list(zip(for_p, system.ask_node_all("decode", to_d), strict=True))


def num_redraws(system: System, reason: str = "sampling_mismatch") -> int:
    """First tokens that D has drawn itself on KV from elsewhere."""
    return int(system.settled_metric("decode", REDRAWS % reason))
