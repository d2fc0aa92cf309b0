"""Hosts of one machine: network namespaces with addresses of their own on one bridge, and faults between them.

    with HostNetwork("p", "d", "r") as hosts:
        hosts.command("p", ["pd-cluster", ...])  # runs on the host p
        with hosts.parted("p", "d"): ...         # nothing passes between p and d, and no socket hears of it

           ┌ p: eth0 10.77.0.1, fd77::1, p.test
    bridge ┼ d: eth0 10.77.0.2, fd77::2, d.test
    (hub)  └ r: eth0 10.77.0.3, fd77::3, r.test

Faults are filters (cls_bpf) at the hub's ports, by the sender's hardware address, so a partition also cuts ARP and IPv6
neighbours. Rates are htb's. Delay and reordering are a relay's, because not every kernel has netem. The hub has an
address of its own, 10.77.0.254, which no fault concerns: a thread that has `entered` it sees all hosts. What is used of
the kernel: veth, bridge, clsact, cls_bpf, htb and TAP.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster import FORK_SERVER
from tests.integration.two_hosts.tap_relay import TapRelay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HUB = "hub"
CLONE_NEWNET = 0x40000000
# Classic BPF: load the last byte of the sender's hardware address, or a random word; 2 drops, -1 asks the next filter
DROP_FROM = "4,48 0 0 11,21 0 1 {sender},6 0 0 2,6 0 0 4294967295"
DROP_SHARE = "4,32 0 0 4294963256,53 1 0 {limit},6 0 0 2,6 0 0 4294967295"
_serials = count(1)


class NoNamespaces(Exception):
    """This process may not make network namespaces, or the kernel lacks a part."""


class HostNetwork:
    """The hosts, in the order of their names. At its end nothing of it is left."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self._unique = f"pdt{os.getpid()}x{next(_serials)}"
        self._priorities = count(1)

    def __enter__(self) -> HostNetwork:
        """Raises NoNamespaces."""
        if not (shutil.which("ip") and shutil.which("tc")):
            raise NoNamespaces("iproute2 (ip, tc) is not installed")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.close()
            raise NoNamespaces(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        for name in (*self.names, HUB):
            subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / self.namespace(name), ignore_errors=True)

    def address(self, name: str, *, v6: bool = False) -> str:
        number = 254 if name == HUB else self.names.index(name) + 1
        return f"fd77::{number:x}" if v6 else f"10.77.0.{number}"

    def hostname(self, name: str) -> str:
        return f"{name}.test"

    def namespace(self, name: str) -> str:
        return f"{self._unique}{name}"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a host."""
        return ["ip", "netns", "exec", self.namespace(name), *command]

    @contextlib.contextmanager
    def entered(self, name: str = HUB) -> Iterator[None]:
        """This thread's sockets are the host's, if they are made meanwhile. Only of threads with an end of their own:
        others begin with the network of the thread that starts them."""
        with open(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net") as before:
            with open(f"/run/netns/{self.namespace(name)}") as there:
                _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(before.fileno())

    # faults

    @contextlib.contextmanager
    def cut(self, sender: str, receiver: str) -> Iterator[None]:
        """What one host sends to the other is lost without a word. The other way is open."""
        with self._filter(receiver, DROP_FROM.format(sender=self.names.index(sender) + 1)):
            yield

    @contextlib.contextmanager
    def parted(self, one: str, other: str) -> Iterator[None]:
        with self.cut(one, other), self.cut(other, one):
            yield

    @contextlib.contextmanager
    def lossy(self, share: float) -> Iterator[None]:
        """This share of all packets to all hosts is lost."""
        with contextlib.ExitStack() as stack:
            for name in self.names:
                stack.enter_context(self._filter(name, DROP_SHARE.format(limit=round(share * 2**32))))
            yield

    @contextlib.contextmanager
    def limited(self, rate: str) -> Iterator[None]:
        """Each host receives and sends at most so much, as tc writes it: 10gbit."""
        devices = [(HUB, f"to-{name}") for name in self.names] + [(name, "eth0") for name in self.names]
        with contextlib.ExitStack() as stack:
            for where, device in devices:
                self._tc(where, f"qdisc add dev {device} root handle 1: htb default 1 r2q 1000")
                stack.callback(self._tc, where, f"qdisc del dev {device} root")
                self._tc(where, f"class add dev {device} parent 1: classid 1:1 htb rate {rate}")
            yield

    @contextlib.contextmanager
    def relayed(self, name: str, delay_s: float, reordered: float = 0.0) -> Iterator[None]:
        """Frames to and from a host are late by so much each way, and a share of them later still: see tap_relay.py.
        This thread must be at the hub."""
        relay = TapRelay("near", "far", delay_s, reordered)
        try:
            self._ip(HUB, "link add farther type bridge")
            for device, bridge in (("near", "bridge"), ("far", "farther"), (f"to-{name}", "farther")):
                self._ip(HUB, f"link set {device} master {bridge} up")
            self._ip(HUB, "link set farther up")
            relay.start()
            yield
        finally:
            self._ip(HUB, f"link set to-{name} master bridge")
            self._ip(HUB, "link del farther")
            relay.close()

    @contextlib.contextmanager
    def _filter(self, receiver: str, program: str) -> Iterator[None]:
        priority = next(self._priorities)
        place = f"dev to-{receiver} egress protocol all prio {priority}"
        self._tc(HUB, f"filter add {place} bpf da bytecode", program)
        try:
            yield
        finally:
            self._tc(HUB, f"filter del {place}")

    # inside

    def _make(self) -> None:
        lines = "127.0.0.1 localhost\n::1 localhost\n" + "".join(
            f"{self.address(name, v6=v6)} {self.hostname(name)}\n" for name in self.names for v6 in (False, True)
        )
        for name in (HUB, *self.names):
            _run(["ip", "netns", "add", self.namespace(name)])
            folder = Path("/etc/netns") / self.namespace(name)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(lines)
            self._ip(name, "link set lo up")
        self._ip(HUB, "link add bridge type bridge")
        self._settle(HUB, "bridge")
        for number, name in enumerate(self.names, 1):
            there = f"name eth0 address 02:00:00:00:00:{number:02x} netns {self.namespace(name)}"
            self._ip(HUB, f"link add to-{name} type veth peer {there}")
            self._ip(HUB, f"link set to-{name} master bridge up")
            self._tc(HUB, f"qdisc add dev to-{name} clsact")
            self._settle(name, "eth0")
        with self.cut(*self.names[:2]):
            pass  # a kernel without the filters is found here

    def _settle(self, name: str, device: str) -> None:
        self._ip(name, f"addr add {self.address(name)}/24 dev {device}")
        self._ip(name, f"addr add {self.address(name, v6=True)}/64 dev {device} nodad")
        self._ip(name, f"link set {device} up")

    def _ip(self, name: str, command: str) -> None:
        _run(["ip", "-n", self.namespace(name), *command.split()])

    def _tc(self, name: str, command: str, *more: str) -> None:
        _run(["tc", "-n", self.namespace(name), *command.split(), *more])


def in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread of its own, to its end. Raises what it raises. Commands may be forked in it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    FORK_SERVER.begin()  # else it would begin in the network that `work` enters
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
