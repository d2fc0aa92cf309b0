"""What prompts may take of one step.

A step that decodes keeps streams waiting, so where those are limited its prompts have a *cost* besides their number: a
token counts as one, and once more for every `keys_per_token` keys that it sees. After 6,000 tokens of its own prompt a
token of 8B holds decodes up for twice as long as at the beginning, and half as many fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Self

from pd_connectors.protocol.feed import FAR

LEAST_PROMPT_TOKENS = 32  # prompt tokens of a step beside any number of decodes, so that no prompt starves
STEP_MULTIPLE = 64  # captured steps have whole ones; prompts get one, if it fits, whatever they cost
COARSE = 512  # tokens from which captured sizes are two STEP_MULTIPLEs apart
# After FAR tokens a prompt is cut at whole ROUNDs of a step: large tiles of attention fill an H200 at 528 tokens of 32
# heads, and a few more need a second round. After 40,000, beside one stream, 512, 768 and 1,024 take 32, 51 and 58 ms
# (8B). With any size four mixed nodes within 38 ms a step answered 3.73 turns a second, so 3.84 (simulated)
ROUND = 512
PADDING_PRICE = 4  # a prompt is cut by one more token, to avoid padding, if it keeps at least this many for it


@dataclass(slots=True, kw_only=True)
class PrefillBudget:
    """The share of one step for prompts, given out in order. After a prompt that was cut, none gets any more."""

    tokens_left: int = 0
    cost_left: int = 0
    least_left: int = 0  # tokens that prompts get whatever they cost; 0 too if costs are not limited
    keys_per_token: int = 0  # 0: position costs nothing
    num_planned: int = 0  # tokens in the step, including decodes that are about to enter
    num_given: int = 0  # tokens of prompts among them
    is_limited: bool = False

    @classmethod
    def whole(cls, num_tokens: int) -> Self:
        """Of a step of which prompts may have so many tokens, whatever they cost."""
        return cls(tokens_left=num_tokens, cost_left=num_tokens)

    @classmethod
    def beside(
        cls, num_decodes: int, max_num_tokens: int, most: int, keys_per_token: int = 0, most_cost: int = 0
    ) -> Self:
        """The budget of a step of at most `max_num_tokens` tokens with `num_decodes` decodes.

        most: the highest cost of the prompts, unless `most_cost` is higher. Their number is at most `most`, and lower:
        with the decodes it is that of a captured step.
        If this leaves prompts less than LEAST_PROMPT_TOKENS, it is the next STEP_MULTIPLE that does not.
        """
        num_tokens = captured_tokens(num_decodes, most)
        return cls(
            tokens_left=min(num_tokens, max_num_tokens - num_decodes),
            cost_left=max(num_tokens, most, most_cost),
            least_left=min(STEP_MULTIPLE, num_tokens),
            keys_per_token=keys_per_token,
            num_planned=num_decodes,
            is_limited=True,
        )

    def admits(self, start: int) -> bool:
        """True if a token after at most `start` others still fits. False also closes the budget for later prompts."""
        if not self._room(start):
            self.tokens_left = 0
        return self.tokens_left > 0

    def take(self, start: int, num_remaining: int) -> int:
        """Take tokens for a prompt with `num_remaining` ones after `start` others; at least one if admitted.

        A prompt that is cut ends where a captured step ends, if it reaches little beyond that: the rest would cause
        padding. It is not shortened if that leaves the step's prompts less than LEAST_PROMPT_TOKENS. A far one ends
        with a whole ROUND where it reaches beyond one, if that leaves it half, and no few tokens for another step.
        """
        num_tokens = min(num_remaining, self._room(start))
        if self.is_limited and start >= FAR and (total := self.num_planned + num_tokens) > ROUND:
            excess = total % ROUND
            ends = num_tokens == num_remaining and excess < LEAST_PROMPT_TOKENS
            if not ends and num_tokens - excess >= max(LEAST_PROMPT_TOKENS, num_tokens / 2):
                num_tokens -= excess
        if num_tokens < num_remaining:
            excess = (self.num_planned + num_tokens) % STEP_MULTIPLE
            keeps_least = self.num_given + num_tokens - excess >= LEAST_PROMPT_TOKENS
            if self.is_limited and keeps_least and num_tokens >= PADDING_PRICE * excess:
                num_tokens -= excess
            self.tokens_left = 0
        else:
            self.tokens_left -= num_tokens
        self.cost_left = max(0, self.cost_left - cost_of(num_tokens, start, self.keys_per_token))
        self.least_left = max(0, self.least_left - num_tokens)
        self.num_planned += num_tokens
        self.num_given += num_tokens
        return num_tokens

    def _room(self, start: int) -> int:
        return min(self.tokens_left, max(self.least_left, affordable(self.cost_left, start, self.keys_per_token)))


def captured_tokens(num_decodes: int, most: int) -> int:
    """Of at most so many tokens, or LEAST_PROMPT_TOKENS, those that make a captured step with the decodes."""
    total, least = num_decodes + most, num_decodes + LEAST_PROMPT_TOKENS
    total -= total % (STEP_MULTIPLE if total < COARSE else 2 * STEP_MULTIPLE)
    return (total if total >= least else -(-least // STEP_MULTIPLE) * STEP_MULTIPLE) - num_decodes


def cost_of(num_tokens: int, start: int, keys_per_token: int) -> int:
    """The cost of a chunk after `start` tokens, rounded up. Its i-th token sees start + i + 1 keys."""
    if not keys_per_token:
        return num_tokens
    return num_tokens + -(-num_tokens * (2 * start + num_tokens + 1) // (2 * keys_per_token))


def affordable(cost: int, start: int, keys_per_token: int) -> int:
    """The longest chunk after `start` tokens that costs at most `cost`: the root of `cost_of`."""
    if not keys_per_token:
        return cost
    linear = 2 * (keys_per_token + start) + 1
    return (isqrt(linear * linear + 8 * keys_per_token * cost) - linear) // 2
