"""The requests that the engine serves now, and how they end before their last token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.engine.admission import refusal

if TYPE_CHECKING:
    from pd_cluster.engine.kv_transfers import KvTransfers
    from pd_cluster.engine.mailbox import Mailbox
    from pd_cluster.engine.replies import Replies
    from pd_cluster.errors import PdError
    from pd_cluster.protocol.messages import Abort
    from pd_cluster.scheduling.scheduler import Scheduler
    from pd_cluster.scheduling.sequence import Request


class LiveRequests:
    """Each was admitted, and its last reply was not sent yet."""

    def __init__(self, scheduler: Scheduler, transfers: KvTransfers, replies: Replies, mailbox: Mailbox) -> None:
        self._scheduler, self._transfers, self._replies, self._mailbox = scheduler, transfers, replies, mailbox
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Begin to serve one that is valid. Raises PdError for one that the engine has no room for."""
        self._transfers.admit(request)
        if not request.finished:
            self._requests[request.request_id] = request

    def abort(self, message: Abort) -> None:
        """Stop a request or one of its sequences. Does nothing for one that has ended already."""
        request = self._requests.get(message.request_id)
        if request is None:
            return
        live = [seq.index for seq in request.sequences if seq.finish_reason is None]
        if message.index is None or live == [message.index]:
            self._transfers.revoke(request)
        update = self._scheduler.abort(request, message.index, message.reason)
        if update is not None:
            self._replies.report(update)

    def fail(self, seq_id: int, error: PdError) -> None:
        """End the request of a sequence that cannot go on. Does nothing for a sequence that has ended already."""
        request = self._scheduler.request_of(seq_id)
        if request is None:
            return
        self._replies.tell()
        self._transfers.revoke(request)
        self._scheduler.abort(request)
        self._mailbox.send(refusal(request.message, error))
        self.forget(request)

    def fail_all(self, adapter: str, error: PdError) -> None:
        """End the requests that have this adapter."""
        for request in [one for one in self._requests.values() if one.message.adapter == adapter]:
            for seq in [one for one in request.sequences if one.finish_reason is None][:1]:  # one may end just now
                self.fail(seq.seq_id, error)

    def forget(self, request: Request) -> None:
        """Forget one that has ended, when its last reply was sent."""
        self._transfers.forget(request)
        self._requests.pop(request.request_id, None)
        # Sequences and request refer to each other: without this only a garbage collection frees them
        request.sequences, request.beams = [], None
