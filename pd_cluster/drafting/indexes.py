"""Makes the indexes of texts on one thread: that of 60,000 tokens takes 8 ms. Their memory is bounded."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster.drafting.token_index import TOKEN_BYTES, TokenIndex

if TYPE_CHECKING:
    from concurrent.futures import Executor

logger = logging.getLogger(__name__)

MOST_BYTES = 256_000_000  # of all indexes of a node: 20 million tokens of prompts
SPARE_BYTES = 16_000_000  # of them, that texts leave to the outputs of sequences that have theirs
TEXT_BYTES = 4096  # that a text counts as, however short: so their number is bounded too


@dataclass(slots=True, eq=False)
class IndexedText:
    """A text, some sequences that look it up, and its index: None until it is made."""

    token_ids: list[int]  # more may be appended
    num_tokens: int  # that are indexed
    num_users: int
    index: TokenIndex | None = None
    made: Future[None] | None = None  # None: it has not begun, because there was no room

    @property
    def num_bytes(self) -> int:
        return TEXT_BYTES + TOKEN_BYTES * self.num_tokens

    def make(self) -> None:
        try:
            self.index = TokenIndex(self.token_ids[: self.num_tokens])
        except Exception:  # a thread keeps it to itself
            logger.exception("a text of %d tokens has no index: nothing of it is drafted", self.num_tokens)


class Indexes:
    """The indexes of a node. One thread uses it. Another one makes the indexes, and ends with this object.

    Invariant: each text is released as often as it has users, and then nothing of it is counted.
    """

    def __init__(self, pool: Executor | None = None) -> None:
        """`pool`: makes the indexes. None: a thread, which starts with the first one."""
        self._pool = pool or ThreadPoolExecutor(1, "draft-index")
        self._is_refused = False
        self.num_bytes = 0

    def index_of(self, text: IndexedText) -> TokenIndex | None:
        """The index of a text. None: it is being made, from now on at the latest, or there is no room for it now.

        Ask when a sequence decodes: texts of 400 prompts that waited left no room for those that ran.
        """
        if text.made is None and not self._is_refused and self.take(text.num_bytes, SPARE_BYTES):
            try:
                text.made = self._pool.submit(text.make)
            except RuntimeError as error:  # the system has no more threads
                self._is_refused = True
                self.give(text.num_bytes)
                logger.warning("nothing is drafted from now on, because the thread for it cannot start: %s", error)
        return text.index

    def release(self, text: IndexedText) -> None:
        """Note that one of the text's users has ended."""
        text.num_users -= 1
        if not text.num_users and text.made is not None:
            text.made.cancel()
            self.give(text.num_bytes)

    def take(self, num_bytes: int, spare: int = 0) -> bool:
        """Count memory as used. False: there is no room, or less than `spare` would be left."""
        if has_room := self.num_bytes + num_bytes <= MOST_BYTES - spare:
            self.num_bytes += num_bytes
        return has_room

    def give(self, num_bytes: int) -> None:
        """Count memory of `take` as free."""
        self.num_bytes -= num_bytes
