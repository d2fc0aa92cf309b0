"""Mooncake Store as a store: a master that goes and comes back, a full segment; and what is said without Mooncake."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pd_connectors.mooncake import READ_DEADLINE_S, MooncakeClient, MooncakeConnector, MooncakeStore
from pd_connectors.protocol.errors import ConnectorUnavailable
from pd_connectors.registry import create_connector
from pd_connectors.store import ObjectName, StoreUnavailable
from tests.connectors.forked import start_process
from tests.connectors.mooncake_master import MooncakeMaster, needs_mooncake
from tests.connectors.pool_bench import POOL_CONTEXT
from tests.integration.system import wait_until
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

NAMES = [ObjectName("cd" * 16, bytes([i]) * 16) for i in range(40)]
OWNED_BYTES, SETUP_DEADLINE_S = 200_000, 60.0


def can_store(store: MooncakeStore, names: Sequence[ObjectName]) -> bool:
    try:
        return store.put([(name, name.hash) for name in names]) == len(names)
    except StoreUnavailable:
        return False


@needs_mooncake
@pytest.mark.integration
def test_a_master_that_comes_back_is_found_again() -> None:
    with MooncakeMaster() as master:
        client = MooncakeClient(("127.0.0.1", master.port), "127.0.0.1", 32 << 20)
        store = MooncakeStore(client)
        wait_until(lambda: can_store(store, NAMES), lambda: "the master does not answer")
        assert store.contains(NAMES) == [True] * len(NAMES)
        assert [bytes(got or b"") for got in store.get(NAMES[:3])] == [name.hash for name in NAMES[:3]]
        master.kill()
        with pytest.raises(StoreUnavailable):
            store.contains(NAMES)
        for _ in range(3):  # by the port, at once: Mooncake's own client would wait, and tell a status
            with pytest.raises(StoreUnavailable, match="refused"):
                store.contains(NAMES)
        master.start()
        wait_until(lambda: can_store(store, NAMES), lambda: "the master that came back does not answer")
        assert store.contains(NAMES) == [True] * len(NAMES)
        assert next(store.get(NAMES[:1])) == bytearray(NAMES[0].hash)
        client.close()


@needs_mooncake
@pytest.mark.integration
@pytest.mark.slow
def test_a_node_that_stands_still_holds_a_reader_shortly() -> None:
    """Mooncake's own 30 s held both loading threads, and its polling took 0.2 of a core for each."""
    with MooncakeMaster() as master:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        owner = start_process(_own, theirs, master.port)
        try:
            assert ours.poll(SETUP_DEADLINE_S), "the owner stored nothing"
            client = MooncakeClient(("127.0.0.1", master.port), "127.0.0.1", 32 << 20)
            store = MooncakeStore(client)
            assert [len(got or b"") for got in store.get(NAMES[:1])] == [OWNED_BYTES]
            assert owner.pid is not None
            os.kill(owner.pid, signal.SIGSTOP)
            began_s = time.monotonic()
            assert list(store.get(NAMES[1:2])) == [None]
            assert time.monotonic() - began_s < 5 * READ_DEADLINE_S
            client.close()
        finally:
            owner.kill()
            owner.join()


def _own(pipe: Connection, port: int) -> None:
    """Store the first two names in this process's memory, and stay."""
    store = MooncakeStore(MooncakeClient(("127.0.0.1", port), "127.0.0.1", 32 << 20))
    wait_until(
        lambda: store.put([(name, bytes(OWNED_BYTES)) for name in NAMES[:2]]) == 2, lambda: "nothing can be stored"
    )
    pipe.send(None)
    signal.pause()


@pytest.mark.long
@needs_mooncake
def test_a_missing_server_is_reported_at_once() -> None:
    client = MooncakeClient(("127.0.0.1", free_port()), "127.0.0.1", 32 << 20)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="refused"):
            MooncakeStore(client).contains(NAMES)
    client.close()


def test_without_mooncake_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConnectorUnavailable, match=r"pip install 'pd-cluster\[mooncake\]'.*libibverbs"):
        create_connector("mooncake", POOL_CONTEXT)


@pytest.mark.parametrize("url", ["127.0.0.1:50051", "mooncake://:1", "mooncake://host", "lm://host:1"])
def test_a_url_that_is_none_is_explained(url: str) -> None:
    with pytest.raises(ConnectorUnavailable, match="like mooncake://"):
        MooncakeConnector(replace(POOL_CONTEXT, options=(("pool_url", url),)))
