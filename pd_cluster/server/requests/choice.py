"""One of the n sequences of a request on the text side: token ids in, parts of an answer out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import FinishReason, SequenceTokens
from pd_cluster.server.requests.predicted_tokens import FollowedPrediction
from pd_cluster.server.text.detokenizer import Detokenizer
from pd_cluster.server.tools.output_parser import ParserContext, num_chars
from pd_connectors.protocol.messages import SampledToken

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_cluster.server.requests.generation_request import GenerationRequest
    from pd_cluster.server.text.detokenizer import Vocabulary
    from pd_cluster.server.tools.output_parser import Part


@dataclass(slots=True)
class ChoiceOutput:
    """The output of a choice: of one step, of the steps of a backlog, or of the whole choice."""

    index: int
    parts: list[Part] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    has_cut_call: bool = False  # known at the end: a call that was shown in part did not end

    @property
    def num_chars(self) -> int:
        """Characters that were released: of all parts, see `output_parser.num_chars`. The same however it was cut."""
        return sum(map(num_chars, self.parts))

    def add(self, later: ChoiceOutput) -> None:
        self.parts += later.parts
        self.tokens += later.tokens
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.has_cut_call = later.has_cut_call


class Choice:
    """Detokenizer and output parser of one sequence."""

    def __init__(self, index: int, request: GenerationRequest, vocabulary: Vocabulary) -> None:
        text = request.text
        self.index = index
        self.finished = False
        self._include_stop = text.include_stop
        self._stop_token_ids = request.sampling.stop_token_ids
        self.followed = None if request.predicted is None else FollowedPrediction(request.predicted)
        self._parser = text.parser and text.parser(
            ParserContext(vocabulary, request.prompt, text.parser_options, _call_ids(request, index))
        )
        self._detokenizer = Detokenizer(
            vocabulary,
            text.stop,
            include_stop=text.include_stop,
            skip_special=text.skip_special and not (self._parser and self._parser.reads_special_tokens),
            min_tokens=request.sampling.min_tokens,
            markers=getattr(self._parser, "markers", ()),
        )

    @property
    def num_tokens(self) -> int:
        return self._detokenizer.num_tokens

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None: no parser that counts them."""
        return getattr(self._parser, "num_reasoning_tokens", None)

    @property
    def met_stop_string(self) -> bool:
        return self._detokenizer.stop is not None

    def extend(self, new: SequenceTokens) -> ChoiceOutput:
        """The output of these tokens. Tokens after the one that completed a stop string are dropped."""
        detokenizer = self._detokenizer
        parts: list[Part] = []
        texts, used = [], 0
        for used, token in enumerate(new.tokens, 1):
            ends_it = new.stop_token_id is not None and used == len(new.tokens)
            text = detokenizer.push(token.token_id, hidden=ends_it and not self._include_stop)
            if self._parser is None:
                texts.append(text)
            else:
                parts += self._parser.push(text, (token.token_id,))
            if detokenizer.stop is not None:
                break
        if self.followed is not None:
            self.followed.push([token.token_id for token in new.tokens[:used]])
        reason = new.finish_reason
        # the model's own end token is not reported
        stop = new.stop_token_id if new.stop_token_id in self._stop_token_ids else None
        if detokenizer.stop is None and reason is not None:
            texts.append(detokenizer.flush())
        if detokenizer.stop is not None:
            reason = FinishReason.STOP
        self.finished = reason is not None
        if text := "".join(texts):
            parts += [text] if self._parser is None else self._parser.push(text, ())
        if self.finished and self._parser is not None:
            parts += self._parser.flush()
        is_cut = self.finished and getattr(self._parser, "has_cut_call", False)
        return ChoiceOutput(self.index, parts, list(new.tokens[:used]), reason, detokenizer.stop or stop, is_cut)

    def replay(self, token_ids: Iterable[int]) -> ChoiceOutput:
        """Take over a stream in which another node has shown these tokens.

        Pass the output to `ResponseShape.chunk` and drop the bytes: the client has them.
        """
        return self.extend(SequenceTokens(self.index, tuple(map(SampledToken, token_ids))))


def _call_ids(request: GenerationRequest, index: int) -> str:
    """See `ParserContext`. A client may give all of its requests one id, and cut all prompts to one length."""
    return f"{request.client_request_id}/{request.prompt_digest.hex()}/{index}"
