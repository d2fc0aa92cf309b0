"""Harnesses for connectors that hand a request's KV from node to node."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from pd_connectors.loopback import Faults, LoopbackNetwork
from tests.conformance.harness import FOREVER_S, LOAD_DEADLINE_S, NUM_SOURCE_BLOCKS, SIZE, Harness, Prompt, Reader
from tests.connectors.layouts import over
from tests.connectors.remote_node import COMMANDS, LAYOUT, DrivenNode, Node, RemoteNode, context, remote_node, stamp

if TYPE_CHECKING:
    from types import TracebackType

    from pd_connectors.protocol.ticket import Ticket

JUNK = 999  # version of what overwrites a prompt


class HandoffHarness(Harness):
    """The source is a prefill node; every load is of a lease of its own."""

    waits_for_the_rest = True
    parts = ("peer",)
    source: DrivenNode

    def __init__(self) -> None:
        super().__init__()
        self._leases: dict[Prompt, list[Ticket]] = {}
        self._stack = ExitStack()
        self._epoch = 0

    def ticket(self, prompt: Prompt) -> Ticket:
        """Of a new lease, in which everything is readable that was offered so far."""
        ticket = self.source.open(prompt.num_tokens)
        self._leases.setdefault(prompt, []).append(ticket)
        if prompt.num_offered:
            self._publish(prompt, ticket)
        return ticket

    def ask(
        self, reader: Reader, prompt: Prompt, load_id: str, first_block: int = 0, deadline_s: float = LOAD_DEADLINE_S
    ) -> None:
        reader.node.connector.begin_load(load_id, self.ticket(prompt), deadline_s)

    def cancel(self, reader: Reader, load_id: str) -> None:
        reader.node.connector.cancel_load(load_id)

    def offer(self, prompt: Prompt, num_blocks: int | None = None) -> None:
        first, prompt.num_offered = prompt.num_offered, prompt.num_blocks if num_blocks is None else num_blocks
        for block_id in prompt.source_blocks[first : prompt.num_offered]:
            self.source.call("stamp", block_id, prompt.version)
        for ticket in self._leases.get(prompt, ()):
            self._publish(prompt, ticket)

    def evict(self, prompt: Prompt) -> None:
        for ticket in self._leases.pop(prompt, ()):
            self.source.call("end", ticket.lease.lease_id)
        for block_id in prompt.source_blocks:
            self.source.call("stamp", block_id, JUNK)
        prompt.num_offered = 0

    def bytes_read(self, reader: Reader) -> float:
        return reader.node.connector.stats()["kv_transfer_bytes_total"]

    def _publish(self, prompt: Prompt, ticket: Ticket) -> None:
        """The first token of every second prompt comes with its last blocks, that of others after them."""
        num_tokens = min(prompt.num_tokens, prompt.num_offered * SIZE)
        is_whole, is_one = num_tokens == prompt.num_tokens, prompt.version % 2 == 0
        lease_id, blocks = ticket.lease.lease_id, prompt.source_blocks[: prompt.num_offered]
        self.source.publish(lease_id, blocks, num_tokens, token_id=7 if is_whole and is_one else -1)
        if is_whole and not is_one:
            self.source.finish(lease_id)

    def _next_epoch(self) -> int:
        self._leases.clear()
        self._epoch += 1
        return self._epoch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class RemoteHandoff(HandoffHarness):
    """The source is in a process of its own."""

    connector: ClassVar[str] = "nixl"
    source: RemoteNode

    def __init__(self) -> None:
        super().__init__()
        self._port = 0

    def stop(self, part: str) -> None:
        os.kill(self.source.pid, signal.SIGSTOP)

    def resume(self, part: str) -> None:
        os.kill(self.source.pid, signal.SIGCONT)

    def kill(self, part: str) -> None:
        self.source.kill()

    def restart(self, part: str) -> None:
        self._stack.close()
        layout = over(LAYOUT, self.source_ranks)
        changes: dict[str, Any] = {"layout": layout, "options": self.options(), "lease_ttl_s": FOREVER_S}
        settings = context("P", self._next_epoch(), port=self._port, **changes)
        self.source = self._stack.enter_context(remote_node(self.connector, settings, NUM_SOURCE_BLOCKS))
        self._port = self.source.port

    def __enter__(self) -> RemoteHandoff:
        self.restart("peer")
        return self


class RankedRemoteHandoff(RemoteHandoff):
    """The source has one rank, the reader two."""

    reader_ranks = 2


class LocalNode(DrivenNode):
    """A source in this process."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def call(self, name: str, *args: Any) -> Any:
        return COMMANDS[name](self.node, *args)

    def kill(self) -> None:
        """Its connector must be off the network by then, or it says goodbye."""
        self.node.close()


class LoopbackHandoff(HandoffHarness):
    """All nodes are in this process, on one network."""

    connector: ClassVar[str] = "loopback"
    source: LocalNode

    def __init__(self) -> None:
        super().__init__()
        self._network = LoopbackNetwork()
        self._port = 0

    def options(self) -> tuple[tuple[str, Any], ...]:
        return (("network", self._network),)

    def stop(self, part: str) -> None:
        self._network.faults = Faults(drop=1.0)

    def resume(self, part: str) -> None:
        self._network.faults = Faults()

    def kill(self, part: str) -> None:
        node = self._network.at(("127.0.0.1", self._port))
        if node is not None:  # it has not closed by itself
            self._network.detach(node)
        self.source.kill()

    def restart(self, part: str) -> None:
        layout = over(LAYOUT, self.source_ranks)
        changes: dict[str, Any] = {"layout": layout, "options": self.options(), "lease_ttl_s": FOREVER_S}
        settings = context("P", self._next_epoch(), port=self._port, **changes)
        node = Node.start(self.connector, settings, NUM_SOURCE_BLOCKS)
        self._stack.callback(node.close)
        for block_id in range(NUM_SOURCE_BLOCKS):
            stamp(node.cache, block_id, 0)
        self.source = LocalNode(node)
        self._port = node.connector.control_port

    def __enter__(self) -> LoopbackHandoff:
        self.restart("peer")
        return self


class RankedLoopbackHandoff(LoopbackHandoff):
    """The source has four ranks, which hold each head twice; the reader has two."""

    source_ranks, reader_ranks = 4, 2
