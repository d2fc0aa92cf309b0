"""Log-probabilities of a prompt on their way from P to D: events of P's leg between its ticket and its end.

The data of an event is {"part": "..."}: base64 of a PromptPart in msgpack, because JSON lacks minus infinity.
"""

from __future__ import annotations

import logging
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

import msgspec
import orjson

from pd_cluster.protocol.prompt_outputs import PromptPart
from pd_http.sse import event_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.protocol.messages import PromptLogprobs
    from pd_cluster.server.prompt_scores import PromptScores

logger = logging.getLogger("pd_cluster.server")

PROMPT_EVENT = "prompt"
EVENT_ENTRIES = 256  # with 20 alternatives each 90 kB, which take P 1 ms, and D 8 ms with their shape
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(PromptPart)


def prompt_events(told: PromptLogprobs) -> Iterator[bytes]:
    """The events that tell D what one step of P's engine has told."""
    for first in range(0, len(told.entries), EVENT_ENTRIES):
        part = PromptPart(told.start + first, told.entries[first : first + EVENT_ENTRIES])
        yield event_bytes({"part": b64encode(_ENCODER.encode(part)).decode()}, PROMPT_EVENT)


class PromptListener:
    """Takes the events of one leg into the scores of its prompt, from the first entry on.

    After an event that is wrong it takes no more: the scores then stay incomplete, and D reads the prompt itself.
    """

    def __init__(self, scores: PromptScores, num_top: int, vocab_size: int) -> None:
        """`num_top`: alternatives that each entry must have."""
        self._scores = scores
        self._num_top = min(num_top, vocab_size)
        self._vocab_size = vocab_size
        self._is_closed = False
        scores.restart()

    def hear(self, data: bytes) -> None:
        """Take the data of one event."""
        if self._is_closed:
            return
        try:
            part = _DECODER.decode(b64decode(orjson.loads(data)["part"]))
            self._check(part)
            self._scores.take(part.start, part.entries)
        except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
            logger.warning("a prefill node told wrong log-probabilities: %s", error)
            self.close()

    @property
    def is_done(self) -> bool:
        """Whether all is told, or no more is taken."""
        return self._is_closed or self._scores.is_complete

    def close(self) -> None:
        """Take no more: the entries come from elsewhere."""
        self._is_closed = True

    def _check(self, part: PromptPart) -> None:
        """Raises ValueError. The scores check positions and the prompt's own tokens."""
        for entry in part.entries:
            if len(entry.top) < self._num_top:
                raise ValueError(f"{len(entry.top)} alternatives instead of {self._num_top}")
            if not all(0 <= one.token_id < self._vocab_size for one in entry.top):
                raise ValueError("an alternative is outside the vocabulary")
