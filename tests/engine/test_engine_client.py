"""The API process's end of the line: what it delivers, and how it notices that the engine is gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq
import zmq.asyncio

from pd_cluster.engine.admission import refusal
from pd_cluster.engine.client import ZmqEngineClient
from pd_cluster.engine.ipc import SignsOfLife
from pd_cluster.errors import EngineFrozen, EngineUnavailable, InvalidRequest, error_named
from pd_cluster.protocol.messages import (
    Abort,
    AddRequest,
    EngineReady,
    FromEngine,
    RequestFailed,
    SilenceAllowed,
    TicketOpened,
    ToEngine,
    Work,
)
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_connectors.protocol.messages import LeaseRef
from pd_connectors.protocol.ticket import Ticket
from tests.connectors.layouts import full_layout
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from pathlib import Path

READY = EngineReady("engine", 1, 8, 16, 128, "fingerprint", "none", 0, 4)
TICKET = Ticket("r", LeaseRef("P", 1, "l"), 0, 1e12, "f", full_layout(16, 1, 1, 1, "float32"), b"d", 3, 1, "h", 1)
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
        await client.wait_ready(HANG_S)
        async with client.open(REQUEST) as stream:
            message = await asyncio.wait_for(anext(aiter(stream)), HANG_S)
        await asyncio.wait_for(watch, HANG_S)
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
    """The API process does not wait for ever for an engine process that hangs, nor for one that hears nothing."""
    failed = asyncio.run(_engine_that_falls_silent(tmp_path))
    assert failed.error == "EngineLost"
    assert "said nothing" in failed.message
    assert {record.message.partition(":")[0] for record in caplog.records} == {
        "the engine did not get a message", "the engine is frozen",
    }  # fmt: skip


async def _engine_of_two_ranks_that_stands_still(directory: Path) -> None:
    context = zmq.asyncio.Context()
    client = ZmqEngineClient(context, f"ipc://{directory}/engine", lambda text: None, frozen_s=0.5)
    engine = context.socket(zmq.PUSH)
    try:
        engine.connect(f"ipc://{directory}/engine.out")
        await _say(engine, msgspec.structs.replace(READY, num_ranks=2))
        await asyncio.wait_for(client.watch(), HANG_S)
        assert client.is_stalled
    finally:
        engine.close(linger=0)
        client.close()
        context.destroy(linger=0)


def test_an_engine_of_several_ranks_is_dead_soon_after_it_is_frozen(tmp_path: Path) -> None:
    """With one rank it would have a minute."""
    asyncio.run(_engine_of_two_ranks_that_stands_still(tmp_path))


async def _engine_of_two_ranks_that_gives_signs_of_life(directory: Path) -> None:
    """It is frozen all the same, so that its requests move, and is alive again with its next word."""
    context = zmq.asyncio.Context()
    address = f"ipc://{directory}/engine"
    client = ZmqEngineClient(context, address, lambda text: None, frozen_s=0.5)
    engine, signs = context.socket(zmq.PUSH), SignsOfLife(address)
    try:
        engine.connect(f"{address}.out")
        await _say(engine, msgspec.structs.replace(READY, num_ranks=2))
        watch = asyncio.create_task(client.watch())
        async with asyncio.timeout(HANG_S):
            loop = asyncio.get_running_loop()
            ends_at = loop.time() + 3.0  # three times what a process that does not run has
            while loop.time() < ends_at or not client.frozen:
                signs.send()
                await asyncio.sleep(0.1)
            assert (client.death, client.num_freezes) == ("", 1)
            await _say(engine, SilenceAllowed(60.0))
            while client.frozen:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        watch.cancel()
    finally:
        signs.close()
        engine.close(linger=0)
        client.close()
        context.destroy(linger=0)


def test_an_engine_of_several_ranks_is_frozen_only_while_its_process_runs(tmp_path: Path) -> None:
    asyncio.run(_engine_of_two_ranks_that_gives_signs_of_life(tmp_path))


async def _engine_that_stands_still(directory: Path) -> None:
    """Its API process fails what waits for a ticket, refuses what is new, and takes it back with the next message."""
    context = zmq.asyncio.Context()
    address = f"ipc://{directory}/engine"
    client, told = ZmqEngineClient(context, address, lambda text: None, frozen_s=0.5), list[bool]()
    client.on_freeze = lambda: told.append(bool(client.frozen))
    engine, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    try:
        engine.connect(f"{address}.out")
        inbox.connect(f"{address}.in")
        watch = asyncio.create_task(client.watch())
        await _say(engine, READY)
        await client.wait_ready(HANG_S)
        with_ticket, without, generating = (
            client.open(msgspec.structs.replace(REQUEST, request_id=name, work=work))
            for name, work in (("ticket", Work.PREFILL), ("none", Work.PREFILL), ("generating", Work.GENERATE))
        )
        await _say(engine, TicketOpened("ticket", TICKET))
        message = await asyncio.wait_for(anext(aiter(without)), HANG_S)
        assert isinstance(message, RequestFailed)
        assert (message.error, client.alive, client.num_freezes) == ("EngineFrozen", True, 1)
        assert "said nothing" in client.frozen
        with pytest.raises(EngineFrozen):
            client.open(msgspec.structs.replace(REQUEST, request_id="new"))
        assert [type(one) for one in with_ticket.drain_ready()] == [TicketOpened]
        assert generating.drain_ready() == []
        sent = [msgspec.msgpack.decode(await inbox.recv(), type=ToEngine) for _ in range(4)]
        assert sent[3] == Abort("none")
        await _say(engine, SilenceAllowed(60.0))
        while client.frozen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)  # twice what is allowed without that word
        assert told == [True, False]
        watch.cancel()
    finally:
        client.close()
        engine.close(linger=0)
        inbox.close(linger=0)
        context.term()


def test_a_frozen_engine_is_no_dead_one(tmp_path: Path) -> None:
    asyncio.run(_engine_that_stands_still(tmp_path))


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
