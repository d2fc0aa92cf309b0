"""What the feed of one node says, applied to the node's view and the prefix index. Pure: no IO, no clock."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from pd_connectors.protocol.feed import FeedDelta, FeedSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd_connectors.protocol.feed import FeedMessage, NodeLoad
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable
    from pd_router.nodes.prefix_index import PrefixIndex

LEAST_TOKEN_S = 1e-12  # a measured time that is shorter is none; its inverse must be a number
SLICE_BLOCKS = 1000  # taken or forgotten at once, in 3 ms: other tasks run between two slices


class FeedLost(Exception):
    """The feed ended or cannot be read. It may be asked for again."""


class NodeFeed:
    """Takes the messages of one node's feed, connection after connection."""

    def __init__(self, index: PrefixIndex[Node], node: Node, table: NodeTable | None = None) -> None:
        """`table`: gets what the node says of adapters."""
        self._view = node.view
        self._index = index
        self._node = node
        self._table = table
        self._number: int | None = None  # of the last message of this connection; None: none has come
        self._epoch: int | None = None  # of the snapshot

    def begin(self) -> None:
        """A new connection: the next message is a snapshot."""
        self._number = None

    def apply(self, message: FeedMessage) -> Iterator[None]:
        """Take a message, in steps of a few ms. Raises FeedLost for one that must not come now.

        The first step takes the load together with the charges that it includes. Charges that the node's last boot
        included stay so: those requests are lost, and their legs end.
        """
        _check_load(message.load)
        if isinstance(message, FeedSnapshot):
            self._index.forget(self._node)
            self._index.tell(self._node, message.last_turn)
            self._epoch = message.epoch
        elif self._number is None:
            raise FeedLost("the first message is not a snapshot")
        elif message.number != self._number + 1:
            raise FeedLost(f"message {message.number} follows {self._number}")
        self._number = message.number
        self._view.receive(message.load, message.charges)
        if self._epoch == self._node.epoch:  # else /health will tell of the restart, and the role
            self._node.receive_role(message.role, message.role_changes)
        if self._table is not None and (message.adapters or isinstance(message, FeedSnapshot)):
            self._table.tell_adapters(self._node, message.adapters, is_whole=isinstance(message, FeedSnapshot))
        if isinstance(message, FeedDelta) and message.is_last:
            self._node.liveness.leaving_epoch = self._epoch
        yield from self._sweep()
        yield from self._take_blocks(message)

    def forget(self) -> Iterator[None]:
        """Forget what the node said, at once; the steps free its memory."""
        self._view.forget()
        self._index.forget(self._node)
        if self._table is not None:
            self._table.tell_adapters(self._node, None)
        return self._sweep()

    def _take_blocks(self, message: FeedMessage) -> Iterator[None]:
        """Evict, store and move, SLICE_BLOCKS blocks between two yields: a small message is taken at once."""
        index, room = self._index, SLICE_BLOCKS
        parts: list[tuple[Callable[[Node, Any], None], tuple[Any, ...]]] = [(index.store, message.stored)]
        if isinstance(message, FeedDelta):
            parts = [(index.evict, message.evicted), *parts, (index.move, message.moved)]
        for take, blocks in parts:
            at = 0
            while at < len(blocks):
                if not room:
                    yield
                    room = SLICE_BLOCKS
                now = blocks[at : at + room]
                take(self._node, now)
                at, room = at + len(now), room - len(now)

    def _sweep(self) -> Iterator[None]:
        while self._index.sweep(SLICE_BLOCKS):
            yield


def _check_load(load: NodeLoad) -> None:
    """Raises FeedLost for figures that no node has: one of them would draw all requests, or none."""
    figures = msgspec.structs.astuple(load)
    if min(figures) < 0 or not sum(figures) < math.inf:  # a NaN is not less than anything
        raise FeedLost(f"a figure is negative or not finite: {load}")
    if 0 < load.token_s < LEAST_TOKEN_S:
        raise FeedLost(f"no node computes a token in {load.token_s} s")
