"""Names for the blocks of a prompt: after which step of its text chain the tokens of a block are known.

A place in the rendered prompt maps to a place in the canonical text (`text_chain`) after the text that is written
there:

    inside a message's content    the same character of the content
    between two contents          the beginning of the second: its role and calls come before it in the canonical text
    after the last content        none

Contents are found in the rendered text in order, each at the first place: a wrong place is too early, and names a later
step. Those that are not found are passed over. A tokenizer may join the last tokens of a block with what follows, so a
block ends MARGIN_TOKENS later.

What a template writes in the last turn alone is named in the text of that turn (`LastTurn`). A name that is wrong costs
a prefill and no answer: engines compare the hashes of tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import date
from typing import TYPE_CHECKING

import msgspec

from pd_connectors.protocol.text_chain import AS_ALWAYS, TOKEN_BYTES, chain_key, read_canonical, step_ends, step_hashes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pd_cluster.server.requests.prompt_space import PromptSpace
    from pd_cluster.server.state import NodeState
    from pd_cluster.server.text.tokenizer import Encoded
    from pd_connectors.protocol.text_chain import CanonicalText, LastTurn

MARGIN_TOKENS = 8
# Contents of a prompt that are looked for in vain: each look reads the rest of the text, 0.03 to 0.25 ms for 400 kB
MAX_MISSED = 64
Steps = tuple[tuple[int, int], ...]  # see `AddRequest.steps`
NO_STEPS: Steps = ()
# A content: its first character in the rendered text, its first byte in the canonical text, and what is written
_Span = tuple[int, int, str]


class PromptSteps:
    """Makes the names of one request's prompt while that is tokenized, on the tokenizer's thread."""

    def __init__(self, raw: bytes, key: bytes, space: str, block_size: int, last_turn: LastTurn = AS_ALWAYS) -> None:
        """`last_turn`: of the chat template."""
        self._raw = raw
        self._last_turn = last_turn
        self._key = key
        self._space = space
        self._block_size = block_size
        self.steps: Steps = ()

    def name_text(self, encoded: Encoded, contents: Sequence[str]) -> None:
        """`contents`: those of the messages, or the prompt.

        There are no names where one message of the client became several.
        """
        canonical = self._canonical()
        if canonical is None or len(contents) != len(canonical.starts):
            return
        if not canonical.is_ids and encoded.has_ends:
            self._name(self._ends(encoded, _spans(encoded.text, contents, canonical.starts)), canonical)

    def name_ids(self, num_tokens: int) -> None:
        """A prompt of so many ids."""
        canonical = self._canonical()
        if canonical is not None and canonical.is_ids:
            ends = range(self._block_size, num_tokens + 1, self._block_size)
            self._name(((end, canonical.starts[0] + TOKEN_BYTES * end) for end in ends), canonical)

    def _canonical(self) -> CanonicalText | None:
        return read_canonical(msgspec.json.decode(self._raw, type=dict[str, msgspec.Raw]), self._last_turn)

    def _name(self, ends: Iterable[tuple[int, int]], canonical: CanonicalText) -> None:
        """Name the last block of each step. `ends`: blocks as (tokens, bytes of the text that decides them)."""
        hashes, named = step_hashes(self._key, self._space, canonical.text, canonical.starts), {}
        step_places = step_ends(len(canonical.text), canonical.starts)
        for num_tokens, num_bytes in ends:
            step = bisect_left(step_places, num_bytes)
            if step >= len(hashes):
                break
            named[step] = num_tokens
        self.steps = tuple((num_tokens, hashes[step]) for step, num_tokens in named.items())

    def _ends(self, encoded: Encoded, spans: Iterator[_Span]) -> Iterator[tuple[int, int]]:
        begin, byte, text, at = -1, 0, "", 0
        for num_tokens in range(self._block_size, len(encoded.ids) - MARGIN_TOKENS + 1, self._block_size):
            end = encoded.end_of(num_tokens - 1 + MARGIN_TOKENS)
            while end > begin + len(text):
                if (span := next(spans, None)) is None:
                    return
                (begin, byte, text), at = span, 0
            before, at = at, max(at, end - begin)
            byte += len(text[before:at].encode())
            yield num_tokens, byte


def _spans(text: str, contents: Sequence[str], starts: Sequence[int]) -> Iterator[_Span]:
    """The contents that are not blank and that the template writes as they are."""
    end = num_missed = 0
    for content, start in zip(contents, starts, strict=True):
        shown = content.strip()  # many templates trim it
        if shown and num_missed < MAX_MISSED:
            if (begin := text.find(shown, end)) < 0:
                num_missed += 1
                continue
            end = begin + len(shown)
            yield begin, start + len(content[: content.index(shown)].encode()), shown


def names_for(state: NodeState, space: PromptSpace, raw: bytes) -> PromptSteps | None:
    """None: no router reads the feed."""
    if not state.feed.is_on:
        return None
    if state.tokenizer.chat_template.writes_date:
        state.feed.begin_day(date.today())
    return PromptSteps(raw, chain_key(state.key), space.text, state.ready.block_size, state.feed.last_turn)


def given_steps(steps: Iterable[tuple[int, int]], num_tokens: int, block_size: int) -> Steps:
    """Names from another node, for a prompt of `num_tokens`: those that can be used here."""
    usable = {n: step for n, step in steps if 0 < n <= num_tokens and n % block_size == 0 and 0 <= step < 1 << 64}
    return tuple(sorted(usable.items()))
