"""The messages that tell the API process of one Update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import PromptLogprobs, PromptRead, TokensOut

if TYPE_CHECKING:
    from pd_cluster.protocol.messages import FromEngine
    from pd_cluster.scheduling.scheduler import Update
    from pd_cluster.scheduling.sequence import Request, Sequence


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
