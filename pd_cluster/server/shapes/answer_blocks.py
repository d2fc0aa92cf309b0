"""The parts of an answer as blocks: reasoning, text and calls, in the order in which the model wrote them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from pd_cluster.server.tools.output_parser import Reasoning, ToolCall
from pd_http.member_bounds import BAD_JSON

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pd_cluster.server.tools.output_parser import Part

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class AnswerBlock:
    """Neighbouring parts of one kind, or one call."""

    index: int  # in the answer
    kind: Kind
    id: str = ""  # of a call
    name: str = ""  # of a call
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The reasoning, the text, or the arguments of the call."""
        return "".join(self.pieces)

    @property
    def has_whole_arguments(self) -> bool:
        """Of a call: whether it was not cut off, and did not break, after pieces that the client has."""
        try:
            msgspec.json.decode(self.text or "{}", type=dict[str, msgspec.Raw])
        except BAD_JSON:
            return False
        return True


class BlockStep(NamedTuple):
    """`piece`: of a block that grows."""

    what: Literal["open", "grow", "close"]
    block: AnswerBlock
    piece: str = ""


class AnswerBlocks:
    """Puts parts together as they come. The blocks do not depend on how the answer was cut into parts."""

    def __init__(self) -> None:
        self.all: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def take(self, parts: Iterable[Part]) -> Iterator[BlockStep]:
        for part in parts:
            kind, piece = _kind_and_text(part)
            begins_call = isinstance(part, ToolCall) and bool(part.name)
            if not piece and not begins_call:
                continue
            if self._open is None or self._open.kind != kind or begins_call:
                yield from self.close()
                block = self._open = AnswerBlock(len(self.all), kind)
                if isinstance(part, ToolCall):
                    block.id, block.name = part.id, part.name
                self.all.append(block)
                yield BlockStep("open", block)
            if piece:
                self._open.pieces.append(piece)
                yield BlockStep("grow", self._open, piece)

    def close(self) -> Iterator[BlockStep]:
        """No more parts come for the block that is open, if there is one."""
        if self._open is not None:
            yield BlockStep("close", self._open)
        self._open = None


def _kind_and_text(part: Part) -> tuple[Kind, str]:
    if isinstance(part, str):
        return "text", part
    return ("reasoning", part.text) if isinstance(part, Reasoning) else ("call", part.arguments)


def blocks_of(parts: Iterable[Part]) -> AnswerBlocks:
    """The blocks of a whole answer."""
    blocks = AnswerBlocks()
    for _ in blocks.take(parts):
        pass
    return blocks
