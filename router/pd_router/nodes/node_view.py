"""What a node has to do, as this router sees it: the node's own word, and what this router has sent since."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING

from pd_router.nodes.ledger import CONTEXT_S, DECODE_S, ChargeLedger, LoadFigures
from pd_router.nodes.told_context import ToldContext
from pd_router.nodes.trial import IdleTrial

if TYPE_CHECKING:
    from collections.abc import Collection

    from pd_connectors.protocol.feed import NodeLoad

USUAL_TOKENS_PER_BYTE = 0.25  # English text and code, tokenizers of 32k to 128k tokens
GUESS_BYTES = 4_000  # of text that the usual ratio weighs as much as
MOST_BYTES = 64  # for a token, of a prompt that teaches: a body may have megabytes in fields that no node reads
# Prompt tokens that a step beside decodes takes however many keys they have (the engine's `PrefillBudget`)
LEAST_STEP_TOKENS = 64
MEMORY_BYTES = 1_000_000  # of text that decide a ratio: what is older weighs half, a quarter ...


class FeedState(StrEnum):
    NONE = "none"  # the node has no feed, or has not been asked yet
    LIVE = "live"
    LOST = "lost"  # it is asked again


class TextRatio:
    """Prompt tokens per byte of text, learned from prompts that a node has counted."""

    def __init__(self) -> None:
        self._bytes = float(GUESS_BYTES)
        self._tokens = GUESS_BYTES * USUAL_TOKENS_PER_BYTE
        self.value = USUAL_TOKENS_PER_BYTE  # each choice reads it for each node

    def note(self, num_tokens: int, num_bytes: int) -> None:
        """Note a counted prompt. One of more tokens than bytes, or of few, is no text and teaches nothing."""
        if not 0 < num_tokens <= num_bytes <= MOST_BYTES * num_tokens:
            return
        self._bytes += num_bytes
        self._tokens += num_tokens
        if self._bytes > MEMORY_BYTES:
            self._tokens *= MEMORY_BYTES / (2 * self._bytes)
            self._bytes = MEMORY_BYTES / 2
        self.value = self._tokens / self._bytes


@dataclass(slots=True, eq=False)
class NodeView:
    """The load of one node. Written by its feed and by the charges on it."""

    load: NodeLoad | None = None  # the newest of the feed; None: no feed, so only own charges are known
    feed: FeedState = FeedState.NONE
    ledger: ChargeLedger = field(default_factory=ChargeLedger)
    ratio: TextRatio = field(default_factory=TextRatio)  # shared by all nodes with the same models
    trial: IdleTrial = field(default_factory=IdleTrial)
    contexts: ToldContext = field(default_factory=ToldContext)  # shared by all nodes

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that the node has to compute before a new prompt."""
        return self.ledger.total.queued_tokens

    @property
    def num_sequences(self) -> int:
        """Generations that run or wait on the node."""
        return self.ledger.total.num_sequences

    @property
    def late_room(self) -> int:
        """Generations more with which all are within `NodeLoad.late_room`'s targets; 0: not known."""
        return 0 if self.load is None else self.load.late_room - self.ledger.own_sequences

    def receive(self, load: NodeLoad, charges: Collection[int]) -> None:
        """Take a load of the feed, and the numbers of the charges that it includes."""
        if load != self.load or charges:  # else cached blocks alone have changed
            self.load = load
            self.ledger.receive(self._figures(load), charges)
        if load.queued_tokens:  # also of another router's trial
            self.trial.begin()

    def _figures(self, load: NodeLoad) -> LoadFigures:
        num_sequences, context_s = load.num_running + load.num_waiting, load.context_s or CONTEXT_S
        if load.context_s:
            context: float = load.num_context
            self.contexts.note(load.num_context, num_sequences)
        else:  # an older release, or it has measured no steps yet
            context = self.contexts.mean * num_sequences
        return LoadFigures(
            *pace_of(load), load.queued_tokens, load.queued_keys, num_sequences,
            load.num_slots or inf, load.free_blocks * load.block_size if load.block_size else inf,
            load.stream_room if load.tpot_s else inf, DECODE_S * num_sequences + context_s * context, context_s,
        )  # fmt: skip

    def forget(self) -> None:
        """Note that the feed's word no longer holds: only own charges are known until the next snapshot."""
        self.load = None
        self.ledger.forget()


def pace_of(load: NodeLoad) -> tuple[float, float, float, float]:
    """Seconds that a prompt token takes at present, and those more for each token before it; and both where a step
    takes fewest tokens, which is the most that one takes. 0: not known.

    Beside decodes a prompt gets a share of each step, which shrinks with the tokens before it, and waits for all of the
    step. Five streams of 40,000 tokens take 11 ms a step, in which 64 tokens of a prompt join them that has as many
    cached: 240 us each, where a share that did not shrink made 130 (8B, H200).
    """
    token_s, key_s, share, keys = load.token_s, load.key_s, load.step_tokens, load.step_keys
    if not token_s or not share:
        return token_s, key_s, 0.0, 0.0
    share_s = load.step_s / share
    if not keys:
        return token_s + share_s, key_s, 0.0, 0.0
    return token_s + share_s, key_s + share_s / keys, token_s + load.step_s / min(share, LEAST_STEP_TOKENS), key_s
