"""Streams in frames for tests of the router: made from a seed, cut where a test says, and continued as a node does."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd_connectors.protocol.stream_codec import encode_message
from pd_http.frames import ChoiceProgress, Frame, StreamEnd, StreamHead

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = "version-1"
HEAD = StreamHead(VERSION, "cmpl-1", 1_700_000_000, 17, 3, 0, b"\x00digest\xff")
END = StreamEnd(b'data: {"usage": {}}\n\ndata: [DONE]\n\n')


@dataclass(frozen=True)
class ScriptedStream:
    """What every node of a test would write: `choices[index]` are pieces (token ids, text, held or not)."""

    frames: tuple[Frame, ...]

    @property
    def text(self) -> bytes:
        """All that the client gets."""
        return b"".join(frame.data for frame in self.frames) + END.data

    def known_after(self, count: int) -> list[dict[str, Any]]:
        """`choices` of the continuation after the first `count` frames."""
        known: dict[int, dict[str, Any]] = {}
        for progress in (progress for frame in self.frames[:count] for progress in frame.choices):
            choice = known.setdefault(progress.index, {"index": progress.index, "token_ids": [], "num_chars": 0})
            choice["token_ids"] += progress.token_ids
            choice["num_chars"] += progress.num_chars
            choice["finish_reason"] = progress.finish_reason
            choice["num_cached_tokens"] = progress.num_cached_tokens
        return [known[index] for index in sorted(known)]

    def count_of(self, known: Sequence[dict[str, Any]]) -> int:
        """The number of frames that `known` includes: what a node finds by its replay. ValueError: it is no such."""
        for count in range(len(self.frames) + 1):
            if self.known_after(count) == list(known):
                return count
        raise ValueError(f"no node has written this: {known}")

    def messages(self, skip: int = 0) -> list[bytes]:
        """Encoded: a head, the frames without the first `skip`, the end."""
        return [encode_message(message) for message in (HEAD, *self.frames[skip:], END)]


def make_stream(seed: int, *, num_choices: int = 1, num_frames: int = 6) -> ScriptedStream:
    """Each choice ends in a frame of its own; text of some frames is held and comes with a later one."""
    rng = random.Random(seed)
    held = dict.fromkeys(range(num_choices), "")
    open_choices = set(held)
    frames = []
    for number in range(num_frames + num_choices):
        index = rng.choice(sorted(open_choices))
        is_last = num_frames + num_choices - number <= len(open_choices)
        ids = tuple(rng.randrange(1 << 17) for _ in range(rng.randrange(1, 4)))
        text = held[index] + f"<{index}:{number}\u00e9>"
        is_held = not is_last and rng.random() < 0.3
        held[index] = text if is_held else ""
        released = "" if is_held else text
        if is_last:
            open_choices.remove(index)
        data = f"data: {released}\n\n".encode() if released else b""
        frames.append(Frame((ChoiceProgress(index, ids, len(released), "stop" if is_last else "", index),), data))
    return ScriptedStream(tuple(frames))
