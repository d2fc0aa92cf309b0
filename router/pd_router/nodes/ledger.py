"""This router's charges on one node, and which of them the load that the node tells includes. Pure."""

from __future__ import annotations

import itertools
from math import inf
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


DECODE_S = 10e-6  # of a step, for each of its decodes (8B, H200) ...
CONTEXT_S = 33e-9  # ... and for each token of KV that they read: 1.3 ms at 40,000 tokens. A node tells its own
USUAL_CONTEXT = 1200  # tokens of a sequence where nothing says it


class LoadFigures(msgspec.Struct, frozen=True, gc=False):
    """What a choice reads of a node's load. Made when something changes, because each choice reads it of each node."""

    token_s: float = 0.0  # seconds for a prompt token at present; 0: not measured
    key_s: float = 0.0  # and for each token before it
    most_token_s: float = 0.0  # in place of these, if that is less: where a step takes fewest tokens; 0: not known
    most_key_s: float = 0.0
    queued_tokens: int = 0  # prompt tokens to compute before a new prompt
    queued_keys: int = 0  # tokens before each of them, summed
    num_sequences: int = 0  # generations that run or wait
    num_slots: float = inf
    free_tokens: float = inf  # room in the KV cache; below 0 if it is promised twice
    stream_room: float = inf  # generations more within the target of time per token; inf: it has none
    streams_s: float = 0.0  # of a step, by its generations and their contexts
    context_s: float = CONTEXT_S  # of that, for each token

    def reading_s(self, num_tokens: float, num_keys: float) -> float:
        """Seconds for prompt tokens with so many before them, summed: at the pace, or at the most that one takes."""
        seconds = num_tokens * self.token_s + num_keys * self.key_s
        if not self.most_token_s:
            return seconds
        return min(seconds, num_tokens * self.most_token_s + num_keys * self.most_key_s)


NOTHING_REPORTED = LoadFigures()


class NodeWork(msgspec.Struct, frozen=True, gc=False):
    """What a charge adds to a node's load."""

    tokens: int = 0  # prompt tokens to compute
    cached_tokens: int = 0  # of the same prompts, before those; not to be computed
    sequences: int = 0  # generations
    context: int = 0  # tokens of their prompts, of all of them

    @property
    def keys(self) -> int:
        """Tokens before each token to compute, summed."""
        return self.tokens * (2 * self.cached_tokens + self.tokens) // 2


NO_WORK = NodeWork()


class LedgerEntry(msgspec.Struct, eq=False, gc=False):
    """One charge. Written by the ledger only."""

    number: int
    work: NodeWork
    is_included: bool = False  # in the node's load


class ChargeLedger:
    """The open charges on one node. `reported`: the node's load by its own word. `total`: with those that it lacks.

    Between its opening and its closing a charge is counted exactly once: in the sums of this ledger, or in the node's
    load from the message on that names its number.
    """

    __slots__ = (
        "_entries", "_numbers", "own_context", "own_keys", "own_sequences", "own_tokens", "reported", "router", "total",
    )  # fmt: skip

    def __init__(self, router: str = "", numbers: Iterator[int] | None = None) -> None:
        """`router`: this router's name at nodes. `numbers`: the one counter of all ledgers of a router."""
        self.router = router
        self.own_tokens = 0
        self.own_keys = 0
        self.own_sequences = self.own_context = 0
        self.reported = self.total = NOTHING_REPORTED
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._entries: dict[int, LedgerEntry] = {}

    def open(self, work: NodeWork) -> LedgerEntry:
        entry = LedgerEntry(next(self._numbers), work)
        self._entries[entry.number] = entry
        self._count(work, 1)
        self._add_up()
        return entry

    def change(self, entry: LedgerEntry, work: NodeWork) -> None:
        """Replace the work of an open charge: an estimate, or what has been done since."""
        if entry.number in self._entries and not entry.is_included:
            self._count(entry.work, -1)
            self._count(work, 1)
            self._add_up()
        entry.work = work

    def close(self, entry: LedgerEntry) -> None:
        """End a charge. Idempotent."""
        is_counted = self._entries.pop(entry.number, None) is not None and not entry.is_included
        if is_counted and entry.work is not NO_WORK:
            self._count(entry.work, -1)
            self._add_up()

    def receive(self, reported: LoadFigures, numbers: Iterable[int]) -> None:
        """Take the node's load, which counts these charges. Numbers of closed charges are ignored."""
        self.reported = reported
        for number in numbers:
            entry = self._entries.get(number)
            if entry is not None and not entry.is_included:
                entry.is_included = True
                self._count(entry.work, -1)
        self._add_up()

    def forget(self) -> None:
        """Note that no load of the node is known: every open charge is this router's own."""
        self.reported = NOTHING_REPORTED
        for entry in self._entries.values():
            if entry.is_included:
                entry.is_included = False
                self._count(entry.work, 1)
        self._add_up()

    def _count(self, work: NodeWork, sign: int) -> None:
        if work.tokens:
            self.own_tokens += sign * work.tokens
            self.own_keys += sign * work.keys
        self.own_sequences += sign * work.sequences
        self.own_context += sign * work.context

    def _add_up(self) -> None:
        load = self.reported
        if not (self.own_tokens or self.own_sequences):  # without both there is nothing of the rest
            self.total = load
            return
        self.total = LoadFigures(
            load.token_s, load.key_s, load.most_token_s, load.most_key_s, load.queued_tokens + self.own_tokens,
            load.queued_keys + self.own_keys, load.num_sequences + self.own_sequences, load.num_slots,
            load.free_tokens - self.own_tokens, load.stream_room - self.own_sequences,
            load.streams_s + DECODE_S * self.own_sequences + load.context_s * self.own_context, load.context_s,
        )  # fmt: skip
