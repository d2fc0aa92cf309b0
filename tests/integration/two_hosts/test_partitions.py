"""1,000 requests through each fault between three hosts, and figures of each: `-s` shows them, LOG.md keeps them.

One cluster serves all cases, in turn. A fault begins under load and lasts CUT_S; PD_HOSTS_REQUESTS sets another number.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster import Launcher
from tests.deadlines import HANG_S, SLOW_HANG_S, until
from tests.integration.two_hosts.cluster import HostCluster, three_hosts
from tests.integration.two_hosts.load import Load, Seen
from tests.integration.two_hosts.network import HostNetwork, in_thread

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

pytestmark = [pytest.mark.integration, pytest.mark.slow]
pytest.importorskip("nixl_cu13")
NUM_REQUESTS = int(os.environ.get("PD_HOSTS_REQUESTS", "1000"))
NUM_BEFORE = NUM_REQUESTS // 10  # answered before the fault
CUT_S = 20.0
PARTITIONS = ("p|d", "p>d", "d>p", "p|r", "p>r", "r>p", "d|r", "d>r", "r>d")
CASES = ("plain", "loss 1%", "10 Gbit/s", *PARTITIONS)
FEW_CASES = ("plain", "p|d", "d>r")
DELAYS = {
    "0.2 ms by TAP relay": (0.0002, 0.0),
    "20 ms by TAP relay": (0.02, 0.0),
    "reordered by TAP relay": (0.0, 0.05),
}
STREAM_BYTES = 1 << 30


@pytest.mark.parametrize(
    ("family", "cases"),
    [("v4", CASES), ("v4", tuple(DELAYS)), ("v6", FEW_CASES), ("name", FEW_CASES)],
    ids=["faults", "delays", "v6", "names"],
)
def test_requests_through_each_fault(family: str, cases: tuple[str, ...]) -> None:

    def work() -> None:
        with three_hosts() as network, Launcher() as launcher:
            cluster = HostCluster(launcher, network, family)
            load = Load(cluster.url("r"), num_clients=6, num_tokens=8)
            asyncio.run(load.learn())
            for case in cases:
                title, fault = f"{family} {case}", fault_of(network, case)
                asyncio.run(check(cluster, load, title, fault, is_cut=case in PARTITIONS))
            assert cluster.restarted() == []

    in_thread(work)


def fault_of(network: HostNetwork, case: str) -> AbstractContextManager[None]:
    if case == "loss 1%":
        return network.lossy(0.01)
    if case == "10 Gbit/s":
        return network.limited("10gbit")
    if case in DELAYS:
        return network.relayed("p", *DELAYS[case])
    if "|" in case:
        return network.parted(*case.split("|"))
    return network.cut(*case.split(">")) if ">" in case else contextlib.nullcontext()


async def check(
    cluster: HostCluster, load: Load, case: str, fault: AbstractContextManager[None], *, is_cut: bool
) -> None:
    seen, after, again_s = Seen(), Seen(), 0.0

    async def disturb() -> None:
        nonlocal again_s
        await until(lambda: seen.num_requests >= NUM_BEFORE, deadline_s=SLOW_HANG_S)
        with fault:
            if is_cut:
                await asyncio.sleep(CUT_S)
            else:
                await until(lambda: seen.num_requests >= NUM_REQUESTS - 20, deadline_s=SLOW_HANG_S)
        healed_s = time.monotonic()
        await cluster.hands_over_again(load, after)
        again_s = time.monotonic() - healed_s

    fallbacks = await cluster.fallbacks()
    await asyncio.gather(disturb(), load.run(lambda told: told.num_requests >= NUM_REQUESTS, seen))
    await cluster.wait_clean()
    fell_back = await cluster.fallbacks() - fallbacks
    say(f"{case}: {seen}; {fell_back:g} without P's KV; P hands over again {again_s:.1f} s after the fault")
    assert (seen.altered, after.altered, seen.failed, after.failed) == ([], [], {}, {})
    assert cluster.restarted() == []


def test_kv_is_about_as_fast_as_a_plain_stream_and_the_link_is_offered() -> None:
    """`check --offer-link` and `--read-link` between the two hosts, beside one TCP stream over the same cable."""

    def work() -> None:
        with three_hosts() as network, Launcher() as launcher:
            plain = max(stream_bytes_per_s(network) for _ in range(3))
            cluster = HostCluster(launcher, network, starts=False)
            line = cluster.offer_link("p").wait_line("", also="")
            Path(link := f"/tmp/{os.getpid()}.link").write_text(line)
            done = cluster.check("d", f"--read-link={link}")
            Path(link).unlink()
            found = [text for text in done.stdout.split("│") if "GB/s between two" in text]
            assert found, done.stdout + done.stderr
            say(f"plain stream {plain / 1e9:.2f} GB/s; {' '.join(found[0].split())}")

    in_thread(work)


def test_a_node_that_advertises_a_wrong_address_is_named() -> None:
    """P tells D an address of its own host that D does not reach. The requests are served."""

    def work() -> None:
        with three_hosts() as network, Launcher() as launcher:
            cluster = HostCluster(launcher, network, advertised={"p": "127.0.0.1"})
            asyncio.run(load_one(cluster))
            began_s = time.monotonic()
            told = cluster.processes["d"].wait_line("does not answer at 127.0.0.1:8101", HANG_S)
            say(f"named {time.monotonic() - began_s:.1f} s after the answer: {told}")

    async def load_one(cluster: HostCluster) -> None:
        began_s = time.monotonic()
        await Load(cluster.url("r"), num_tokens=8).learn()
        say(f"three answers after {time.monotonic() - began_s:.1f} s")

    in_thread(work)


def stream_bytes_per_s(network: HostNetwork) -> float:
    """One TCP connection from P's host to D's."""
    with network.entered("p"):
        listener = socket.create_server((network.address("p"), 9000))

    def send() -> None:
        sent, piece = 0, bytes(1 << 20)
        there, _ = listener.accept()
        with there:
            while sent < STREAM_BYTES:
                there.sendall(piece)
                sent += len(piece)

    sender = threading.Thread(target=send)
    sender.start()
    with network.entered("d"), socket.create_connection((network.address("p"), 9000), HANG_S) as ours:
        room, got, began_s = bytearray(1 << 20), 0, time.perf_counter()
        while num := ours.recv_into(room):
            got += num
        took_s = time.perf_counter() - began_s
    sender.join()
    listener.close()
    assert got == STREAM_BYTES
    return got / took_s


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
