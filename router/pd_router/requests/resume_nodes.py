"""Whether a stream that lost its decode node may go on, and at which nodes. Pure: reads nodes, changes none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_http.errors import FINAL_CODES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_http.frames import StreamFailed
    from pd_router.nodes.node import Node
    from pd_router.requests.stream_record import StreamRecord


def may_continue(record: StreamRecord, reported: StreamFailed | None) -> bool:
    """`reported`: what the node said when it gave up; None: it broke off, stood still, or was judged down.

    False if every node would say the same: the request is wrong (4xx), its time is up (504), or it kills nodes.
    """
    if not record.can_continue:
        return False
    return reported is None or (reported.status >= 500 and reported.status != 504 and reported.code not in FINAL_CODES)


# Of one stream without a token between them: more than a cluster loses at a time. Only deaths have another limit, and a
# broken node might say again and again that it drains, each time under another boot epoch
MAX_FAILURES = 100


class ResumeNodes:
    """The nodes that may go on with a stream after a failure. A node that failed it is not asked again.

    It may be asked once it has restarted, or once another node has sent a frame: two nodes that drain in turn may each
    have the stream twice.
    """

    __slots__ = ("_failed", "_num_failures", "_record", "_size")

    def __init__(self, record: StreamRecord) -> None:
        self._record = record
        self._failed: dict[Node, int | None] = {}
        self._size = 0
        self._num_failures = 0  # since the newest token

    def fail(self, node: Node, epoch: int | None) -> None:
        """Note that `node` failed the stream. `epoch`: of its boot when it was asked."""
        if self._record.num_tokens > self._size:
            self._size = self._record.num_tokens
            self._failed.clear()
            self._num_failures = 0
        self._failed[node] = epoch
        self._num_failures += 1

    def among(self, nodes: Iterable[Node]) -> list[Node]:
        """Those of `nodes` that write the same stream and have not failed it. None after MAX_FAILURES."""
        if self._num_failures >= MAX_FAILURES:
            return []
        head = self._record.head
        version = head.stream_version if head is not None else ""
        return [
            node
            for node in nodes
            if version and node.stream_version == version and self._failed.get(node, _NONE) != node.epoch
        ]


_NONE = object()
