"""What the API process is told of requests, in the order in which it happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import PromptLogprobs, PromptRead, TokensOut

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.engine.mailbox import Mailbox
    from pd_cluster.protocol.messages import FromEngine
    from pd_cluster.scheduling.scheduler import Update
    from pd_cluster.scheduling.sequence import Request, Sequence


class Replies:
    """Sends updates. Those of a step may wait until the next one is launched; no other message of a request may pass.

    forget: called with each request that has ended, when its last update was sent.
    """

    def __init__(self, mailbox: Mailbox, forget: Callable[[Request], None]) -> None:
        self._mailbox, self._forget = mailbox, forget
        self.untold: list[Update] = []  # of retired steps, oldest first

    def tell(self) -> None:
        """Send what waits. Call it before anything else is done about a request."""
        untold, self.untold = self.untold, []
        for update in untold:
            self._mailbox.send(reply_of(update))
            if update.finished:
                self._forget(update.request)

    def report(self, update: Update) -> None:
        """Send an update that did not come out of a step."""
        self.untold.append(update)
        self.tell()


def reply_of(update: Update) -> FromEngine:
    """Log-probabilities of the prompt, the end of a READ, or tokens."""
    request, prompt = update.request, update.prompt
    if prompt is None:
        marks = request.marks
        one: Request | Sequence = request.sequences[0] if len(request.sequences) == 1 else request
        return TokensOut(
            request.request_id,
            update.sequences,
            update.finished,
            one.num_cached_tokens,
            one.num_external_tokens,
            None if marks.is_timed else marks.take_timeline(finished=update.finished),
            marks.peer.num_cached_tokens,
            request.num_drafts,
            request.num_accepted_drafts,
        )
    if not update.finished:
        return PromptLogprobs(request.request_id, prompt.start, prompt.entries)
    return PromptRead(
        request.request_id, prompt.pooled, prompt.logits, request.num_cached_tokens, request.marks.timeline()
    )
