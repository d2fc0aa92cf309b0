"""What the client of a framed stream has: enough for another node to go on with it. Pure: no IO, no clock."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from pd_http.frames import Continuation, KnownChoice, KnownHead

if TYPE_CHECKING:
    from pd_http.frames import Frame, StreamHead

# Of all choices of one stream: 4 MiB. A longer stream is passed on, and ends with its node.
MAX_RECORD_TOKENS = 1 << 20
_MAX_CHOICES = 1 << 15
_MAX_ID = (1 << 32) - 1
_SAME = ("stream_version", "response_id", "created", "seed", "num_prompt_tokens", "prompt_digest")


class _ChoiceRecord:
    __slots__ = ("finish_reason", "num_cached_tokens", "num_chars", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.num_chars = 0
        self.finish_reason = ""
        self.num_cached_tokens = 0


class StreamRecord:
    """The head of a stream and what the client has of each choice, over all nodes that wrote it."""

    __slots__ = ("_choices", "_size", "head", "num_told")

    def __init__(self) -> None:
        self.head: StreamHead | None = None
        # Tokens for the times between them: of each frame those of the choice that has most, as all go on side by side
        self.num_told = 0
        self._choices: dict[int, _ChoiceRecord] = {}
        self._size = 0

    @property
    def can_continue(self) -> bool:
        """Whether a node with the same stream version could go on with this stream."""
        return self.head is not None and bool(self.head.stream_version) and not self._is_too_long

    @property
    def _is_too_long(self) -> bool:
        return self._size > MAX_RECORD_TOKENS

    @property
    def num_choices(self) -> int:
        """The number of choices that have begun, of all prompts."""
        return len(self._choices)

    @property
    def num_tokens(self) -> int:
        """Recorded output tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self._choices.values())

    def begin(self, head: StreamHead) -> None:
        """Take the head of a node's answer. Raises ValueError if it is not the head of this stream."""
        if self.head is None:
            self.head = head
            return
        different = [name for name in _SAME if getattr(head, name) != getattr(self.head, name)]
        if different:
            raise ValueError(f"the stream goes on with another {different[0]}")

    def take(self, frame: Frame) -> None:
        """Note a frame that goes to the client. Raises ValueError, and notes nothing, if no node may send it."""
        if self.head is None:
            raise ValueError("a frame came before the head of the stream")
        if self._is_too_long:
            self.num_told += max((len(one.token_ids) for one in frame.choices), default=0)
            return
        self._check(frame)
        most = 0
        for progress in frame.choices:
            choice = self._choices.get(progress.index)
            if choice is None:
                choice = self._choices[progress.index] = _ChoiceRecord()
            choice.token_ids.extend(progress.token_ids)
            choice.num_chars += progress.num_chars
            choice.finish_reason = progress.finish_reason
            choice.num_cached_tokens = progress.num_cached_tokens
            self._size += (num := len(progress.token_ids))
            most = max(most, num)
        self.num_told += most
        if self._is_too_long:
            self._choices.clear()

    def _check(self, frame: Frame) -> None:
        finished: set[int] = set()
        for progress in frame.choices:
            index, ids = progress.index, progress.token_ids
            choice = self._choices.get(index)
            if index in finished or (choice is not None and choice.finish_reason):
                raise ValueError(f"choice {index} goes on after its finish reason")
            if not 0 <= index < _MAX_CHOICES or progress.num_chars < 0:
                raise ValueError(f"choice {index} has {progress.num_chars} more characters")
            if ids and not 0 <= min(ids) <= max(ids) <= _MAX_ID:
                raise ValueError(f"choice {index} has numbers that are no token ids")
            if progress.finish_reason:
                finished.add(index)

    def continuation(self) -> Continuation:
        """What a node needs to go on after the last frame. Only if `can_continue`."""
        assert self.head is not None
        head = msgspec.structs.asdict(self.head)
        head["prompt_digest"] = self.head.prompt_digest.hex()
        known = (
            KnownChoice(
                index=index,
                token_ids=tuple(choice.token_ids),
                num_chars=choice.num_chars,
                finish_reason=choice.finish_reason,
                num_cached_tokens=choice.num_cached_tokens,
            )
            for index, choice in sorted(self._choices.items())
            if choice.token_ids or choice.finish_reason  # with `max_tokens` 0 a choice ends without tokens
        )
        return Continuation(head=KnownHead(**head), choices=tuple(known))
