"""Streams of a closed loop: what is counted of them, and which are right."""

from __future__ import annotations

import random
from math import ceil
from typing import TYPE_CHECKING, cast

import pytest

from benchmarks.closed_loop import ClosedLoop, LoopResult, LoopStream
from benchmarks.offline import DirectMailbox
from benchmarks.recorded_texts import TASKS, RecordedAnswer
from pd_cluster.protocol.messages import Abort, AddRequest, FinishReason, SequenceTokens, TokensOut
from pd_connectors.protocol.messages import SampledToken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.offline import OfflineEngine

SPEEDS = dict(zip(TASKS, (8, 4, 3, 1, 1, 1), strict=True))  # tokens of a step


class SteadyEngine:
    """Gives each stream its task's tokens a step, which takes a second. A prompt is the number of its answer."""

    def __init__(self, answers: Sequence[RecordedAnswer], *, loses: int = 0) -> None:
        """loses: so many tokens at the end of each answer."""
        self.mailbox, self.core = DirectMailbox(), self
        self._answers, self._loses = answers, loses
        self._left: dict[str, tuple[RecordedAnswer, list[int]]] = {}

    def counters(self) -> dict[str, float]:
        return {}

    def turn(self) -> bool:
        for message in self.mailbox.receive():
            if isinstance(message, Abort):
                self._send(message.request_id, [], FinishReason.ABORT)
            else:
                assert isinstance(message, AddRequest)
                answer = self._answers[message.prompt_token_ids[0]]
                self._left[message.request_id] = answer, [*answer.answer[: len(answer.answer) - self._loses]]
        for name, (answer, left) in list(self._left.items()):
            tokens, left[:] = left[: SPEEDS[answer.task]], left[SPEEDS[answer.task] :]
            self._send(name, tokens, None if left else FinishReason.LENGTH)
        self.mailbox.flushed_s += 1
        return bool(self._left)

    def _send(self, name: str, tokens: list[int], reason: FinishReason | None) -> None:
        if reason is not None:
            del self._left[name]
        part = SequenceTokens(0, tuple(map(SampledToken, tokens)), reason)
        self.mailbox.send(TokensOut(name, (part,), finished=reason is not None))


def answers_of(num: int) -> list[RecordedAnswer]:
    """Of all tasks in turn, 60 to 250 tokens each."""
    lengths = random.Random(0)
    return [RecordedAnswer(TASKS[at % len(TASKS)], (at,), tuple(range(lengths.randint(60, 250)))) for at in range(num)]


def result_of(answers: Sequence[RecordedAnswer], num_streams: int, **more: int) -> LoopResult:
    engine = cast("OfflineEngine", SteadyEngine(answers, **more))
    return ClosedLoop(engine, answers, [0] * len(answers), num_streams, len(answers)).run()


@pytest.mark.parametrize("num_streams", [1, 8, 32, 128])
def test_the_rate_is_that_of_whole_answers(num_streams: int) -> None:
    """Fast and slow tasks, each step a second: tokens through steps of all answers, times the streams.

    Of the first ones the first step does not count, which may have more tokens than a last one. Counted from when all
    had begun until all of these had ended, 8, 32 and 128 streams were 9 to 10% faster than that.
    """
    answers = answers_of(max(num_streams, 12))
    result = result_of(answers, num_streams)
    num_tokens = sum(len(one.answer) for one in answers)
    num_steps = sum(ceil(len(one.answer) / SPEEDS[one.task]) for one in answers)
    assert result.rate == pytest.approx(num_streams * num_tokens / num_steps, rel=0.012)
    assert result.seconds < num_steps / num_streams + 1


def test_lost_tokens_are_told() -> None:
    """Of streams that end by themselves. Those that the end of the round cuts are right as far as they came."""
    result = result_of(answers_of(12), 4)
    assert all(one.is_right for one in result.streams)
    assert sum(one.is_over for one in result.streams) < len(result.streams), "some are cut"
    lost = result_of(answers_of(12), 4, loses=1)
    assert all(one.is_right != one.is_over for one in lost.streams)


def test_right_streams() -> None:
    answer = RecordedAnswer("rewrite", (1, 2), (3, 4, 5, 6))

    def is_right(*tokens: int, is_over: bool) -> bool:
        return LoopStream(0, answer, list(tokens), is_over=is_over).is_right

    assert is_right(is_over=False)
    assert is_right(3, 4, is_over=False)
    assert is_right(3, 4, 5, 6, is_over=True)
    assert not is_right(is_over=True)
    assert not is_right(3, 4, is_over=True)
    assert not is_right(3, 5, is_over=False)
