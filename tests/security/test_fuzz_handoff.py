"""Mutated `kv_transfer_params` of genuine handoffs, to P and to D: an error that says why, or the right answer."""

from __future__ import annotations

import time
from base64 import urlsafe_b64decode
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connectors.protocol.keys import derive_key
from pd_connectors.protocol.ticket import Offer, sign
from tests.cluster import TEST_KEY
from tests.security.live_cluster import LiveCluster, text_of
from tests.security.mutations import EXAMPLES, fuzzing, mutated_json

if TYPE_CHECKING:
    import httpx

pytestmark = pytest.mark.integration
KEY = derive_key(TEST_KEY)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_mutated_requests_to_a_decode_node(cluster: LiveCluster, examples: int) -> None:
    """Tickets that live, tickets that were used, and offers: the text is always the prompt's."""
    genuine: dict[str, Any] = {"ticket": cluster.take_ticket()}
    genuine["offer"] = {"do_remote_prefill": True, "offer": sign(KEY, Offer((cluster.prefill,), time.time() + 600))}

    @fuzzing(examples)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(sorted(genuine)))
        if kind == "ticket" and data.draw(st.booleans()):
            genuine["ticket"] = cluster.take_ticket()  # those before it have been used, or expire
        params = data.draw(mutated_json(genuine[kind]))
        answer = cluster.post(cluster.decode, cluster.body(kv_transfer_params=params))
        if answer.status_code == 200 and "kv_transfer_params" in answer.json():  # it has become a prefill leg
            give_back(cluster, cluster.decode, answer)
        else:
            check(cluster, answer)

    fuzz()
    cluster.check_unharmed()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_mutated_requests_to_a_prefill_node(cluster: LiveCluster, examples: int) -> None:
    """The fields of routers that are not ours are there too."""
    genuine = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
               "remote_block_ids": None, "remote_host": None, "remote_port": None}  # fmt: skip

    @fuzzing(examples)
    @given(mutated_json(genuine))
    def fuzz(params: Any) -> None:
        answer = cluster.post(cluster.prefill, cluster.body(kv_transfer_params=params))
        if answer.status_code == 200 and "kv_transfer_params" in answer.json():
            give_back(cluster, cluster.prefill, answer)
        else:
            check(cluster, answer)

    fuzz()
    cluster.check_unharmed()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_mutated_tickets_to_release(cluster: LiveCluster, examples: int) -> None:
    """Nothing but the ticket itself, in whatever spelling of base64, ends its lease."""
    genuine = cluster.take_ticket()

    @fuzzing(examples)
    @given(mutated_json({"ticket": genuine["ticket"]}))
    def fuzz(body: Any) -> None:
        answer = cluster.post(cluster.prefill, body, "/pd/release")
        assert answer.status_code == (200 if signed_bytes(body) == signed_bytes(genuine) else 400), (body, answer.text)

    fuzz()
    cluster.check_unharmed()


def signed_bytes(body: Any) -> bytes | None:
    """What a ticket in a body stands for; None when there is none."""
    try:
        return urlsafe_b64decode(body["ticket"])
    except (TypeError, KeyError, ValueError):
        return None


def check(cluster: LiveCluster, answer: httpx.Response) -> None:
    """The reference's text, or an error with a name."""
    if answer.status_code == 200:
        assert text_of(answer) == cluster.expected
    else:
        assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
        assert answer.json()["error"]["message"]


def give_back(cluster: LiveCluster, url: str, answer: httpx.Response) -> None:
    """P's first token is the reference's, and its ticket can be given back."""
    assert cluster.expected.startswith(text_of(answer))
    ticket = answer.json()["kv_transfer_params"]["ticket"]
    assert cluster.post(url, {"ticket": ticket}, "/pd/release").status_code == 200
