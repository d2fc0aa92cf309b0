"""Mutated bytes of genuine requests, and requests that two parsers could read in two ways, to a live router and nodes.

The answer is never a 5xx, is one of HTTP, and is whole if the client waited for it; the cluster is unharmed afterwards.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connectors.protocol.keys import derive_key
from pd_connectors.protocol.ticket import NodeOrder, sign
from tests.cluster import TEST_KEY
from tests.deadlines import HANG_S
from tests.security.mutations import EXAMPLES, fuzzing, mutated_bytes
from tests.security.wire import Reply, exchange, replies

if TYPE_CHECKING:
    from tests.security.live_cluster import LiveCluster

TARGETS = ["router", "decode", pytest.param("prefill", marks=pytest.mark.slow)]  # both nodes run the same code
COMPLETION = {"prompt": "Mira 4831. Mira?", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True,
        "stream_options": {"include_usage": True}, "stop": ["x"], "logit_bias": {"7": 1.5}, "seed": 3}  # fmt: skip
PREFILL = COMPLETION | {"kv_transfer_params": {"do_remote_decode": True}}


def request(method: str, path: str, body: object = None, *headers: str) -> bytes:
    """As a client would write it; the server closes after its answer."""
    payload = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: cluster", "Connection: close", *headers]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
    return "\r\n".join([*lines, "", ""]).encode() + payload


def chunked(path: str, body: object) -> bytes:
    """The same in two chunks."""
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: cluster\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (payload[:20], payload[20:]))
    return head + pieces + b"0\r\n\r\n"


ORDER = sign(derive_key(TEST_KEY), NodeOrder("drain", "absent", time.time() + 86400))
GENUINE = (
    request("POST", "/v1/completions", COMPLETION),
    request("POST", "/v1/completions", COMPLETION, "x-pd-route: d-first", "x-request-id: abc"),
    request("POST", "/v1/chat/completions", CHAT),
    chunked("/v1/chat/completions", CHAT),
    request("POST", "/tokenize", {"prompt": "hi"}),
    request("POST", "/detokenize", {"tokens": [5, 6]}),
    request("GET", "/v1/models"),
    request("GET", "/health"),
    request("GET", "/metrics", None, "Accept: text/plain"),
)
TO_ROUTER = (*GENUINE, request("GET", "/nodes"), request("POST", "/nodes/absent/drain", {}, f"x-pd-order: {ORDER}"))
TO_NODE = (
    *GENUINE,
    request("GET", "/kv"),
    request("POST", "/v1/completions", PREFILL),
    request("POST", "/v1/completions", PREFILL, "x-pd-ticket: stream"),
    request("POST", "/pd/release", {"ticket": "AAAA"}),
)


@pytest.mark.integration
@pytest.mark.parametrize("target", TARGETS)
def test_genuine_requests_are_answered_whole(cluster: LiveCluster, target: str) -> None:
    """Else the mutated ones would test little."""
    for raw in TO_ROUTER if target == "router" else TO_NODE:
        (reply,), _ = exchange(getattr(cluster, target), raw, HANG_S)
        drained = raw.startswith(b"POST /nodes") or raw.startswith(b"POST /pd/release")
        assert reply.status == (200 if not drained else 404 if b"/nodes" in raw else 400), (raw, reply)
        check(reply, waited=True)
    cluster.check_unharmed()


@pytest.mark.integration
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("examples", EXAMPLES)
def test_mutated_bytes(cluster: LiveCluster, target: str, examples: int) -> None:
    requests = TO_ROUTER if target == "router" else TO_NODE

    @fuzzing(examples)
    @given(st.sampled_from(requests).flatmap(mutated_bytes))
    def fuzz(raw: bytes) -> None:
        answers, gave_up = exchange(getattr(cluster, target), raw)
        for reply in answers:
            check(reply, waited=not gave_up)

    fuzz()
    cluster.check_unharmed()


def check(reply: Reply, *, waited: bool) -> None:
    """No fault of the server's; one end; an error says what is wrong, in OpenAI's shape, where an app answered."""
    assert reply.status < 500, reply
    assert reply.is_whole or not waited, reply
    if reply.headers.get("content-type", "").startswith("text/event-stream") and waited:
        body = reply.body
        ends = body.count(b"data: [DONE]") + body.count(b"event: done\n") + body.count(b"event: error\n")
        assert ends + body.count(b'data: {"error"') == 1, reply


# smuggling: what a proxy in front could read in another way than we do

BODY = json.dumps(COMPLETION).encode()
INNER = request("GET", "/metrics")


def shape(*headers: str, body: bytes = BODY, line: str = "POST /v1/completions HTTP/1.1") -> bytes:
    return "\r\n".join([line, "Host: cluster", *headers, "", ""]).encode("latin-1") + body


LENGTH = f"Content-Length: {len(BODY)}"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = {
    "length and chunks": shape(LENGTH, "Transfer-Encoding: chunked", body=CHUNKS),
    "chunks and length": shape("Transfer-Encoding: chunked", LENGTH, body=CHUNKS),
    "length and chunks, inner": shape("Content-Length: 4", "Transfer-Encoding: chunked", body=b"0\r\n\r\n" + INNER),
    "two lengths": shape(LENGTH, "Content-Length: 5"),
    "two equal lengths": shape(LENGTH, LENGTH),
    "a list of lengths": shape(f"{LENGTH}, {len(BODY)}"),
    "a negative length": shape("Content-Length: -5"),
    "a signed length": shape(f"Content-Length: +{len(BODY)}"),
    "a hexadecimal length": shape(f"Content-Length: {len(BODY):#x}"),
    "a length with an underscore": shape("Content-Length: 5_0"),
    "a length of Arabic digits": shape("Content-Length: \u0665".encode().decode("latin-1")),
    "an empty length": shape("Content-Length:"),
    "a length beyond 64 bits": shape("Content-Length: 18446744073709551621"),
    "a blank before the colon": shape(f"Content-Length : {len(BODY)}"),
    "a folded header": shape("X: a\r\n b", LENGTH),
    "a folded length": shape(f"Content-Length:\r\n {len(BODY)}"),
    "a header without a colon": shape("nonsense", LENGTH),
    "a zero byte in a header": shape("X: a\0b", LENGTH),
    "a zero byte in a name": shape("X\0Y: b", LENGTH),
    "a carriage return in a header": shape("X: a\rb", LENGTH),
    "an unknown coding": shape("Transfer-Encoding: gzip", body=CHUNKS),
    "chunked but not last": shape("Transfer-Encoding: chunked, gzip", body=CHUNKS),
    "chunked, disguised": shape("Transfer-Encoding: xchunked", body=CHUNKS),
    "chunked after a vertical tab": shape("Transfer-Encoding: \x0bchunked", body=CHUNKS),
    "a chunk of negative size": shape("Transfer-Encoding: chunked", body=b"-5\r\n" + CHUNKS),
    "a chunk size with 0x": shape("Transfer-Encoding: chunked", body=b"0x" + CHUNKS),
    "a chunk size with a blank": shape("Transfer-Encoding: chunked", body=b" " + CHUNKS),
    "a chunk size beyond 64 bits": shape("Transfer-Encoding: chunked", body=b"f" * 17 + b"\r\n" + CHUNKS),
    "a chunk without its end": shape("Transfer-Encoding: chunked", body=b"2\r\nabXX0\r\n\r\n"),
    "a blank in the path": shape(LENGTH, line="POST /v1/completions /x HTTP/1.1"),
    "an unknown version": shape(LENGTH, line="POST /v1/completions HTTP/3.7"),
    "an unknown method": shape(LENGTH, line="SMUGGLE /v1/completions HTTP/1.1"),
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tunnel": b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: x\r\n\r\n",
}  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("target", ["router", "decode"])
def test_ambiguous_requests_are_refused(cluster: LiveCluster, target: str) -> None:
    """A refusal and the end of the connection: the rest of its bytes is not read as a request."""
    wrong = {}
    for name, raw in SMUGGLED.items():
        answers, _ = exchange(getattr(cluster, target), raw)
        if [reply.status // 100 for reply in answers] not in ([], [4]):
            wrong[name] = [(reply.status, reply.body[:60]) for reply in answers]
    assert wrong == {}
    cluster.check_unharmed()


# the test's own parts


def test_answers_are_taken_apart() -> None:
    first = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    second = b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n"
    assert [(reply.status, reply.body, reply.is_whole) for reply in replies(first + second)] == [
        (200, b"hi", True), (400, b"no", True),
    ]  # fmt: skip
    assert [reply.is_whole for reply in replies(first[:-1])] == [False]
    assert [reply.is_whole for reply in replies(second[:-8])] == [False]
    with pytest.raises(AssertionError, match="no answer of HTTP"):
        list(replies(first + b"rubbish\r\n\r\n"))
