"""Tickets, offers and orders that are forged, expired, replayed or of another kind, to live nodes and a live router.

Each answer is the right one or an error; no forged address is ever connected to; nothing is left of any of them.
"""

from __future__ import annotations

import socket
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pd_connectors.protocol.keys import derive_key
from pd_connectors.protocol.messages import MAC_BYTES
from pd_connectors.protocol.ticket import NodeOrder, Offer, Ticket, sign, verify
from tests.cluster import TEST_KEY
from tests.security.live_cluster import LiveCluster, other_key, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

pytestmark = pytest.mark.integration
KEY, STRANGER = derive_key(TEST_KEY), derive_key(other_key())
LIFE_S = 60.0


@pytest.fixture(autouse=True)
def _unharmed(cluster: LiveCluster) -> Iterator[None]:
    yield
    cluster.check_unharmed()


@pytest.fixture
def canary() -> Iterator[socket.socket]:
    """Listens, and must never be connected to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def address_of(canary: socket.socket) -> str:
    return f"http://127.0.0.1:{canary.getsockname()[1]}"


def ask(cluster: LiveCluster, params: dict[str, Any], **more: Any) -> httpx.Response:
    """D, with these `kv_transfer_params`."""
    params = {"do_remote_prefill": True} | params
    return cluster.post(cluster.decode, cluster.body(kv_transfer_params=params, **more))


def check_right(cluster: LiveCluster, answer: httpx.Response, prefilled_by: str = "decode-0") -> None:
    assert answer.status_code == 200, answer.text
    assert text_of(answer) == cluster.expected
    if prefilled_by:
        assert answer.headers["x-pd-prefill"] == prefilled_by


def paper(token: str) -> Ticket:
    return verify(KEY, token, Ticket, time.time())


def test_a_ticket_that_is_forged_or_changed_leads_nowhere(cluster: LiveCluster, canary: socket.socket) -> None:
    port = canary.getsockname()[1]
    genuine = cluster.take_ticket()["ticket"]
    ticket, raw = paper(genuine), urlsafe_b64decode(genuine)
    for forged in (
        sign(STRANGER, replace(ticket, host="127.0.0.1", port=port)),
        sign(b"", replace(ticket, port=port)),
        sign(KEY, replace(ticket, port=port))[:-8] + "AAAAAAAA",
        urlsafe_b64encode(raw[:-1]).decode(),
        urlsafe_b64encode(raw + b"\0").decode(),
        urlsafe_b64encode(raw[:MAC_BYTES]).decode(),
        genuine.swapcase(),
        "",
    ):
        check_right(cluster, ask(cluster, {"ticket": forged}))
    cluster.release(genuine)


def test_fields_beside_the_ticket_lead_nowhere(cluster: LiveCluster, canary: socket.socket) -> None:
    """Other routers' fields name a host and a port: only the signed ones count."""
    elsewhere = {"remote_host": "127.0.0.1", "remote_port": canary.getsockname()[1], "remote_engine_id": "x",
                 "remote_block_ids": [1, 2, 3]}  # fmt: skip
    check_right(cluster, ask(cluster, elsewhere))
    params = cluster.take_ticket()
    check_right(cluster, ask(cluster, params | elsewhere), prefilled_by="")


def test_an_expired_ticket_is_not_followed(cluster: LiveCluster) -> None:
    genuine = cluster.take_ticket()["ticket"]
    expired = sign(KEY, replace(paper(genuine), expires_at_s=time.time() - 1))
    check_right(cluster, ask(cluster, {"ticket": expired}))
    cluster.release(genuine)


def test_a_replayed_ticket_gives_the_same_answer_or_none(cluster: LiveCluster) -> None:
    """Together, and again when its lease has ended."""
    params = cluster.take_ticket()
    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(lambda _: ask(cluster, params), range(4)):
            check_right(cluster, answer, prefilled_by="")
    check_right(cluster, ask(cluster, params), prefilled_by="")


def test_a_ticket_is_for_its_own_prompt_only(cluster: LiveCluster) -> None:
    """With it, the KV of a prompt that another client sent cannot be had."""
    params = cluster.take_ticket(salt="victim")
    other = list(range(100, 170))
    alone = text_of(cluster.post(cluster.decode, cluster.body(prompt=other)))
    for more in ({"prompt": other}, {"prompt": other, "cache_salt": "victim"}):
        answer = ask(cluster, {"ticket": params["ticket"]}, **more)
        assert (answer.status_code, answer.headers["x-pd-prefill"]) == (200, "decode-0")
        assert text_of(answer) == alone
    cluster.release(params["ticket"])


@pytest.mark.parametrize("change", [
    {"num_tokens": 1}, {"num_tokens": 2**40}, {"num_samples": 5}, {"generation": 9}, {"fingerprint": "another model"},
    {"version": 99}, {"prompt_digest": b""},
], ids=lambda change: next(iter(change)))  # fmt: skip
def test_a_signed_ticket_that_is_wrong_is_not_believed(cluster: LiveCluster, change: dict[str, Any]) -> None:
    """As a node with another version, or a bug, would sign it."""
    genuine = cluster.take_ticket()["ticket"]
    answer = ask(cluster, {"ticket": sign(KEY, replace(paper(genuine), **change))})
    check_right(cluster, answer, prefilled_by="")
    cluster.release(genuine)


def test_one_kind_of_paper_is_not_another(cluster: LiveCluster, canary: socket.socket) -> None:
    life = time.time() + LIFE_S
    offer = sign(KEY, Offer((address_of(canary),), life))
    order = sign(KEY, NodeOrder("add", address_of(canary), life, "decode"))
    genuine = cluster.take_ticket()["ticket"]
    for params in ({"ticket": offer}, {"ticket": order}, {"offer": order}, {"offer": genuine}):
        check_right(cluster, ask(cluster, params))
    cluster.release(genuine)
    for token in (offer, genuine):
        answer = cluster.post(cluster.router, {}, "/nodes", **{"x-pd-order": token})
        assert answer.status_code == 401, answer.text
    assert cluster.post(cluster.prefill, {"ticket": offer}, "/pd/release").status_code == 400


@pytest.mark.parametrize(("key", "life_s"), [(STRANGER, LIFE_S), (b"", LIFE_S), (KEY, -1.0)],
                         ids=["stranger's", "no key", "expired"])  # fmt: skip
def test_offers_and_orders_of_strangers_lead_nowhere(
    cluster: LiveCluster, canary: socket.socket, key: bytes, life_s: float
) -> None:
    life = time.time() + life_s
    check_right(cluster, ask(cluster, {"offer": sign(key, Offer((address_of(canary),), life))}))
    order = sign(key, NodeOrder("add", address_of(canary), life, "decode"))
    answer = cluster.post(cluster.router, {}, "/nodes", **{"x-pd-order": order})
    assert answer.status_code == 401, answer.text


def test_clients_of_the_router_cannot_name_an_address(cluster: LiveCluster, canary: socket.socket) -> None:
    """What a client says about transfers is taken out, even what the cluster has signed."""
    offer = sign(KEY, Offer((address_of(canary),), time.time() + LIFE_S))
    for params in ({"do_remote_prefill": True, "offer": offer}, {"do_remote_decode": True},
                   {"remote_host": "127.0.0.1", "remote_port": canary.getsockname()[1]}):  # fmt: skip
        for route in ("p-first", "d-first"):
            body = cluster.body(kv_transfer_params=params)
            answer = cluster.post(cluster.router, body, **{"x-pd-route": route})
            check_right(cluster, answer, prefilled_by="")
            assert "kv_transfer_params" not in answer.json()
