"""Conversations of a load test: growing histories, common heads, tool time. All are drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from pd_cluster.bench.workload import Length, poisson
from pd_cluster.errors import StartupError

ONE, EIGHT = Length(1, 1), Length(8, 8)
CONVERSATIONS, RATE = 24, 0.1
HISTORY, NEW, OUTPUT = Length(20_000, 60_000), Length(1_000, 6_000), Length(200, 400)  # tokens


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One request of a conversation. `pause_s`: tools run from the end of the answer before until it is sent."""

    num_new: int  # tokens that it adds to the history
    num_output: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """Its first prompt is a head, which others have in common, and the first turn's new tokens."""

    index: int
    at_s: float  # of its arrival in an open loop
    head: int  # equal numbers mean equal text
    num_head: int  # tokens
    turns: tuple[PlannedTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsPlan:
    """Conversations that arrive at `rate` a second, or, if `at_once` is not 0, so many at once. Lengths in tokens.
    `name`: plans with other names have other texts."""

    num_conversations: int = CONVERSATIONS
    num_turns: Length = EIGHT
    history: Length = HISTORY  # before the first turn; of the last prompt at most
    new: Length = NEW
    output: Length = OUTPUT
    num_head: int = 8_000  # of a history
    num_heads: int = 1
    tool_s: float = 1.0  # mean of an exponential distribution
    at_once: int = 0
    rate: float = RATE
    name: str = ""

    def scaled(self, factor: float) -> TurnsPlan:
        """The same with other lengths."""

        def of(length: Length) -> Length:
            return Length(max(1, round(length.low * factor)), max(1, round(length.high * factor)))

        history, new, output = map(of, (self.history, self.new, self.output))
        return replace(self, history=history, new=new, output=output, num_head=round(self.num_head * factor))

    def conversations(self, seed: int) -> list[Conversation]:
        """A conversation ends early where its next prompt would be too long. Raises StartupError."""
        if min(self.num_conversations, self.num_heads) < 1 or self.num_conversations < self.at_once:
            raise StartupError("turns need a head, and as many conversations as run at once, or more")
        if not 0 <= self.num_head <= self.history.low or self.history.low + self.new.high > self.history.high:
            raise StartupError(
                f"a head of {self.num_head} tokens and {self.new.high} new ones do not fit histories of "
                f"{self.history.low}:{self.history.high}"
            )
        times = poisson(self.num_conversations, self.rate, ONE, ONE, seed)
        return [self._draw(index, 0.0 if self.at_once else time.at_s, seed) for index, time in enumerate(times)]

    def turns_of(self, seed: int) -> list[int]:
        """Of each conversation, how many."""
        return [len(one.turns) for one in self.conversations(seed)]

    def _draw(self, index: int, at_s: float, seed: int) -> Conversation:
        rng = random.Random(f"{seed}/conversation/{index}")
        own, before = self.history.low - self.num_head, self.history.low
        turns: list[PlannedTurn] = []
        for _ in range(self.num_turns.draw(rng)):
            num_new, num_output = self.new.draw(rng), self.output.draw(rng)
            pause_s = rng.expovariate(1.0) * self.tool_s
            if before + num_new > self.history.high:
                break
            turns.append(PlannedTurn(num_new if turns else own + num_new, num_output, pause_s))
            before += num_new + num_output
        return Conversation(index, at_s, index % self.num_heads, self.num_head, tuple(turns))
