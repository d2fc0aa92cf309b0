"""The API process's end of the line: what it delivers, and how it notices that nobody is there any more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq
import zmq.asyncio

from pd_cluster.engine.client import ZmqEngineClient
from pd_cluster.engine.handoffs import refusal
from pd_cluster.engine.messages import AddRequest, EngineReady, FromEngine, RequestFailed
from pd_cluster.engine.sampling_params import SamplingParams
from pd_cluster.errors import EngineUnavailable, InvalidRequest, error_named

if TYPE_CHECKING:
    from pathlib import Path

READY = EngineReady("engine", 1, 8, 16, 128, "fingerprint", "none", 0)
REQUEST = AddRequest("request", [1, 2, 3], SamplingParams(max_tokens=4))


async def _say(socket: zmq.asyncio.Socket, message: FromEngine) -> None:
    await socket.send(msgspec.msgpack.encode([message]))


async def _engine_that_falls_silent(directory: Path) -> RequestFailed:
    context = zmq.asyncio.Context()
    address = f"ipc://{directory}/engine"
    client = ZmqEngineClient(context, address, lambda text: None, frozen_s=0.5, stall_s=0.5)
    engine = context.socket(zmq.PUSH)
    try:
        engine.connect(f"{address}.out")
        watch = asyncio.create_task(client.watch())
        await _say(engine, READY)
        await client.wait_ready(5)
        async with client.open(REQUEST) as stream:
            message = await asyncio.wait_for(anext(aiter(stream)), 10)
        await asyncio.wait_for(watch, 5)
        assert not client.alive
        with pytest.raises(EngineUnavailable):
            client.open(REQUEST)
        assert isinstance(message, RequestFailed)
        return message
    finally:
        client.close()
        engine.close(linger=0)
        context.term()


def test_a_silent_engine_fails_its_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for ever for an engine process that hangs while it lives, nor for one that hears nothing."""
    failed = asyncio.run(_engine_that_falls_silent(tmp_path))
    assert failed.error == "EngineLost"
    assert "said nothing" in failed.message
    assert {record.message.partition(":")[0] for record in caplog.records} == {
        "the engine did not get a message", "the engine is frozen",
    }  # fmt: skip


def test_a_refusal_names_the_field() -> None:
    """What the engine refuses reaches the client with the same `param` and `code` as what the API refuses."""
    told = refusal(REQUEST, InvalidRequest("too long", "max_tokens", "context_length_exceeded"))
    error = error_named(told.error, told.message, told.param, told.code)
    assert isinstance(error, InvalidRequest)
    assert (str(error), error.param, error.code) == ("too long", "max_tokens", "context_length_exceeded")


def test_an_error_without_a_field_keeps_its_kind() -> None:
    error = error_named("EngineUnavailable", "gone")
    assert isinstance(error, EngineUnavailable)
    assert error.code == "engine_unavailable"
