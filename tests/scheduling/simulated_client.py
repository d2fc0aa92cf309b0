"""What a client has seen of a request, and what it had to see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import FinishReason, Work
from pd_cluster.scheduling.sequence import sequence_seed
from tests.scheduling.beam_reference import best_answers
from tests.scheduling.simulation import EOS, continuation, history, logprobs

if TYPE_CHECKING:
    from pd_cluster.scheduling.scheduler import Update
    from pd_cluster.scheduling.sequence import Request


@dataclass
class Client:
    """What a client has seen of one request."""

    request: Request
    outputs: list[list[int]]
    reasons: list[FinishReason | None]
    terminal: bool = False

    @cached_property
    def answers(self) -> list[tuple[list[int], FinishReason]]:
        """Of a beam search."""
        request, eos = self.request, frozenset({EOS})
        sampling, last = request.sampling, history(request.prompt_token_ids)[-1]
        return best_answers(
            sampling, sampling.stop_ids(eos), lambda tokens: logprobs([last, *history(tokens, last)][-1])
        )

    def take(self, update: Update) -> None:
        assert not self.terminal, "an update after the terminal one"
        for report in update.sequences:
            assert self.reasons[report.index] is None, "tokens after the end"
            self.outputs[report.index] += [token.token_id for token in report.tokens]
            self.reasons[report.index] = report.finish_reason
            if report.stop_token_id is not None:
                assert self.outputs[report.index][-1] == report.stop_token_id
        self.terminal = update.finished
        assert update.finished == (None not in self.reasons)

    def expected(self, index: int) -> tuple[list[int], FinishReason]:
        request = self.request
        if request.sampling.beams is not None and request.work is not Work.PREFILL:
            return self.answers[index]
        output, reason = continuation(request.prompt_token_ids, sequence_seed(request.seed, index), request.sampling)
        if request.work is Work.PREFILL:
            stopped = reason is FinishReason.STOP and len(output) == 1
            return output[:1], FinishReason.STOP if stopped else FinishReason.LENGTH
        return output, reason

    def check(self) -> None:
        """Every sequence said what it had to, or was stopped on the way there."""
        for index, (output, reason) in enumerate(zip(self.outputs, self.reasons, strict=True)):
            expected, expected_reason = self.expected(index)
            if reason is FinishReason.ABORT or reason is None:
                assert output == expected[: len(output)], f"sequence {index} went astray"
            else:
                assert (output, reason) == (expected, expected_reason), f"sequence {index} of {self.request.request_id}"
