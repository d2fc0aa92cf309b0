"""The messages that tell the API process of one Update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import PromptLogprobs, PromptRead, TokensOut

if TYPE_CHECKING:
    from pd_cluster.protocol.messages import FromEngine
    from pd_cluster.scheduling.scheduler import Update


def reply_of(update: Update) -> FromEngine:
    """Log-probabilities of the prompt, the end of a READ, or tokens."""
    request, prompt = update.request, update.prompt
    if prompt is None:
        return TokensOut(
            request_id=request.request_id,
            sequences=update.sequences,
            finished=update.finished,
            num_cached_tokens=request.num_cached_tokens,
            num_external_tokens=request.num_external_tokens,
            num_peer_cached_tokens=request.marks.peer.num_cached_tokens,
            timeline=request.marks.take_timeline(finished=update.finished),
        )
    if not update.finished:
        return PromptLogprobs(request.request_id, prompt.start, prompt.entries)
    return PromptRead(
        request.request_id, prompt.pooled, prompt.logits, request.num_cached_tokens, request.marks.timeline()
    )
