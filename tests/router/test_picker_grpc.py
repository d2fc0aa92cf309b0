"""`pd-cluster epp` over its gRPC port: a gateway's calls, health, refusals at start. The nodes are fake ones."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import uvicorn

pytest.importorskip("grpc", reason="grpcio is not installed")
import grpc
from google.protobuf.struct_pb2 import Struct

from pd_connectors.protocol.ticket import Offer, verify
from pd_http.settings import add_flags
from pd_http.sockets import bound
from pd_router.app import create_app
from pd_router.endpoint_picker import cli
from pd_router.endpoint_picker.config import PickerConfig
from pd_router.endpoint_picker.grpc_server import EXT_PROC, LIVENESS, NOT_SERVING, SERVING, PickerServer
from pd_router.endpoint_picker.messages import ProcessingRequest, ProcessingResponse
from tests.in_loop_server import in_loop
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import WAIT_S, FakeNode, running
from tests.router.gateway_messages import completion, request_body, request_headers, response_headers, told
from tests.router.router_process import KEY, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pd_router.requests.services import Services

pytestmark = pytest.mark.anyio


class Picker:
    """A picker that serves, and a gateway's channel to it."""

    def __init__(self, services: Services, server: PickerServer, channel: Any) -> None:
        self.services = services
        self.server = server
        self._process = channel.stream_stream(
            f"/{EXT_PROC}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )
        self._check = channel.unary_unary("/grpc.health.v1.Health/Check")

    def call(self) -> Any:
        """A stream for one HTTP request."""
        return self._process(timeout=WAIT_S)

    async def check(self, service: bytes = b"") -> Any:
        return await self._check(b"\x0a" + bytes((len(service),)) + service, timeout=WAIT_S)

    async def idle(self) -> None:
        """Until no request is left, and no charge."""
        await until(lambda: not self.services.metrics.num_in_flight)
        assert {(n.prefill_bytes, n.decode_sequences) for n in self.services.table.nodes} == {(0, 0)}


@contextlib.asynccontextmanager
async def serving(prefill: list[FakeNode], decode: list[FakeNode], **settings: Any) -> AsyncIterator[Picker]:
    config = PickerConfig(
        prefill=tuple(node.url for node in prefill), decode=tuple(node.url for node in decode), grpc_port=0,
        health_interval_s=3600.0, prefill_on_decode="never", **({"drain_s": 0.1} | settings),
    )  # fmt: skip
    ports: list[PickerServer] = []

    def port(services: Services) -> PickerServer:
        ports.append(PickerServer(services))
        return ports[0]

    app = create_app(config, KEY, ports=(port,))
    async with in_loop(uvicorn.Config(app, log_config=None, access_log=False), bound("127.0.0.1", 0)):
        [server] = ports
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Picker(app.state.services, server, channel)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_gateway_is_sent_to_a_decode_node_with_an_offer(stream: bool) -> None:
    prefill, decode = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(prefill, decode), serving([prefill], [decode]) as picker:
        call, data = picker.call(), completion(stream=stream)
        await call.write(request_headers())
        await call.write(request_body(data))
        head, echo = await call.read(), await call.read()
        named = told(head)
        assert echo.request_body.response.body_mutation.streamed_response.body == data
        assert verify(KEY, named["x-pd-offer"], Offer, time.time()).prefill_urls == (prefill.url,)
        url = f"http://{named.pop('x-gateway-destination-endpoint')}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(url, data=data, headers=named) as answer:
            await answer.read()
        assert decode.seen[0].raw == data
        assert decode.seen[0].headers["x-pd-offer"] == named["x-pd-offer"]
        await call.write(response_headers())
        assert told(await call.read())["x-pd-route"].startswith("d-first")
        await call.done_writing()
        await picker.idle()


async def test_a_gateway_that_goes_away_leaves_no_charge() -> None:
    decode = FakeNode("decode", fakes.decode)
    async with running(decode), serving([], [decode]) as picker:
        call = picker.call()
        await call.write(request_headers())
        await call.write(request_body(completion()))
        await call.read()
        assert picker.services.table.nodes[0].decode_sequences == 1
        call.cancel()
        await picker.idle()
        half = picker.call()
        await half.write(request_headers())
        await half.write(request_body(b"{", is_last=False))
        await until(lambda: picker.services.metrics.num_in_flight)
        half.cancel()
        await picker.idle()


async def test_a_picker_that_leaves_serves_gateways_that_have_not_heard_of_it() -> None:
    """gRPC refuses what comes once it stops, also on connections that a gateway has open."""
    decode = FakeNode("decode", fakes.decode)
    async with running(decode), serving([], [decode], drain_s=WAIT_S, linger_s=WAIT_S) as picker:
        held = picker.call()
        await held.write(request_headers())
        await held.write(request_body(completion()))
        await held.read()
        picker.services.leaving.set()
        assert (await picker.check(), await picker.check(LIVENESS)) == (NOT_SERVING, SERVING)
        call = picker.call()
        await call.write(request_headers())
        await call.write(request_body(completion()))
        assert told(await call.read())["x-gateway-destination-endpoint"] in decode.url
        for one in (call, held):
            await one.done_writing()
            while await one.read() is not grpc.aio.EOF:
                pass
        await picker.server._stop
        with pytest.raises(grpc.aio.AioRpcError):
            await picker.check()


async def test_an_error_ends_the_stream() -> None:
    decode = FakeNode("decode", fakes.decode)
    async with running(decode), serving([], [decode]) as picker:
        call = picker.call()
        await call.write(request_headers())
        await call.write(request_body(b"no JSON"))
        refusal = (await call.read()).immediate_response
        assert (refusal.status.code, json.loads(refusal.body)["error"]["code"]) == (400, "invalid_json")
        assert await call.read() is grpc.aio.EOF
        await picker.idle()


async def test_a_stream_without_a_request_is_ended() -> None:
    decode = FakeNode("decode", fakes.decode)
    async with running(decode), serving([], [decode], body_timeout_s=0.1) as picker:
        call = picker.call()
        refusal = (await call.read()).immediate_response
        assert (refusal.status.code, json.loads(refusal.body)["error"]["code"]) == (408, "slow_body")
        assert await call.read() is grpc.aio.EOF
        await picker.idle()


async def test_a_message_that_cannot_be_read_is_the_gateways_error(caplog: pytest.LogCaptureFixture) -> None:
    decode = FakeNode("decode", fakes.decode)
    async with running(decode), serving([], [decode]) as picker:
        value = Struct()
        nested = value
        for _ in range(200):
            nested = nested.fields["a"].struct_value
        message = ProcessingRequest()
        message.metadata_context.filter_metadata.add(key="envoy.lb").value.CopyFrom(value)
        call = picker.call()
        await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "Traceback" not in caplog.text
        await picker.idle()


async def test_health_tells_whether_a_node_can_decode() -> None:
    decode = FakeNode("decode", fakes.decode)
    async with running(decode), serving([], [decode]) as picker:
        assert await picker.check() == SERVING
        picker.services.table.set_down(picker.services.table.nodes[0])
        assert await picker.check() == NOT_SERVING
        assert await picker.check(EXT_PROC.encode()) == NOT_SERVING
        assert await picker.check(b"liveness") == SERVING


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    add_flags(parser, PickerConfig)
    return cli.run(parser.parse_args(["--start-empty", *flags]))


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--workers", "2") == 2
    assert capsys.readouterr().err.startswith("pd-cluster epp: --workers: ")
    assert run("--grpc-tls-cert", "/nonexistent", "--grpc-tls-key", "/nonexistent") == 2
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        assert run("--grpc-port", str(taken.getsockname()[1])) == 2
    assert "the port is taken" in capsys.readouterr().err
    for name in [name for name in sys.modules if name == "grpc" or name.startswith("pd_router.endpoint_picker.grpc")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert run() == 2
    assert "pip install 'pd-cluster[gateway]'" in capsys.readouterr().err


async def test_a_port_that_is_taken_ends_the_start() -> None:
    decode = FakeNode("decode", fakes.decode)
    async with running(decode):
        with bound("127.0.0.1", 0) as taken:
            taken.listen()
            config = PickerConfig(decode=(decode.url,), grpc_port=taken.getsockname()[1])
            app = create_app(config, KEY, ports=(PickerServer,))
            with pytest.raises(Exception, match="cannot serve gRPC on"):
                async with app.router.lifespan_context(app):
                    pass
