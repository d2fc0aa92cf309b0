"""A step beside streams that is to be planned, and what prompts get of it: the rules of `step_budget.py`, as sums.

The engine's budget asks it with what its queues hold, the planner's coarse nodes with what they keep of streams. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster.scheduling.prefill_budget import LEAST_PROMPT_TOKENS, PrefillBudget, captured_tokens
from pd_cluster.scheduling.targets import AIM, MOST_KEYS, NEARLY_CHEAPEST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_cluster.scheduling.step_model import StepModel
    from pd_cluster.scheduling.targets import Targets

SPREAD = 4  # steps over which slack is spent, or won back
RECOVERY = 0.8  # of the target: the shortest step for a stream without slack


@dataclass(slots=True)
class StreamedStep:
    """What is known of the step before prompts have their share."""

    model: StepModel
    targets: Targets
    num_decodes: int
    max_num_tokens: int
    begin_s: float
    alone_s: float  # of the decodes alone
    slack_s: float  # the least of all streams
    num_waiting: int  # tokens of the next prompts; 0: there are none
    most: int = 0  # tokens of prompts within the bound of gaps
    most_useful: int = 0  # of those that wait, as many as one step takes

    def __post_init__(self) -> None:
        self.most = self.model.tokens_within(self.num_decodes, AIM * self.targets.itl_s - self.alone_s)
        useful = self.given(self.most)
        self.most_useful = min(useful, self.num_waiting) if self.num_waiting else useful

    def by_slack(self) -> tuple[int, bool, float]:
        """Tokens of prompts that the streams allow; whether these are cheap, so that no slack is saved; the pace."""
        longest_s = allowed_s(self.targets, self.slack_s / SPREAD)
        most = self.model.tokens_within(self.num_decodes, longest_s - self.alone_s)
        if self._pays(max(most, LEAST_PROMPT_TOKENS), NEARLY_CHEAPEST):
            return most, True, most / longest_s
        free = max(0.0, 1 - self.alone_s / (AIM * self.targets.tpot_s))
        return max(most, self.within(self.slack_s)), False, free / self._price_s(self.most_useful)

    def within(self, slack_s: float) -> int:
        """Tokens of prompts in the longest step that takes so much slack."""
        return self.model.tokens_within(self.num_decodes, allowed_s(self.targets, slack_s) - self.alone_s)

    def is_late(self, prompts: Iterable[tuple[float, int]], pace: float) -> bool:
        """Whether one of the prompts, by arrival and tokens left, misses its target at so many tokens a second."""
        num_before, ttft_s = 0, AIM * self.targets.ttft_s
        for came_s, num_left in prompts:
            num_before += num_left
            if num_before > pace * (came_s + ttft_s - self.begin_s):
                return True
        return False

    def share(self, most: int, *, is_cheap: bool, num_without: int, may_wait: bool = True) -> PrefillBudget:
        """What prompts get, which had no token in the last `num_without` steps: about `most`, or none yet."""
        if num_without:
            most = max(most, min(self.most, (1 + num_without) * LEAST_PROMPT_TOKENS))
        if may_wait and not is_cheap and not self._pays(self.given(most)):
            return PrefillBudget(is_limited=True)
        return self.share_of(most)

    def share_of(self, most: int) -> PrefillBudget:
        """The share of prompts: `most` tokens if they have none before them, and what fits a captured size."""
        keys = keys_per_token(self.targets, self.model, self.num_decodes + most)
        return PrefillBudget.beside(self.num_decodes, self.max_num_tokens, most, keys)

    def given(self, most: int) -> int:
        """The tokens of that share."""
        return min(captured_tokens(self.num_decodes, most), self.max_num_tokens - self.num_decodes)

    def _pays(self, num_tokens: int, most: float = 1.0) -> bool:
        """Whether each of so many tokens costs at most `most` times its price in the longest useful step."""
        longest = self.most_useful
        return num_tokens >= longest or self._price_s(num_tokens) <= most * self._price_s(longest)

    def _price_s(self, num_tokens: int) -> float:
        """Seconds of each of so many tokens of prompts, on average."""
        return self.model.prolonged_s(self.num_decodes, num_tokens) / num_tokens


def allowed_s(targets: Targets, slack_s: float) -> float:
    """The longest step that takes so much of the streams' slack."""
    tpot_s, itl_s = AIM * targets.tpot_s, AIM * targets.itl_s
    return min(itl_s, max(tpot_s + slack_s, RECOVERY * tpot_s))


def keys_per_token(targets: Targets, model: StepModel, num_tokens: int) -> int:
    """Keys that cost a prompt's token in a step of so many tokens as much as the token itself."""
    keys, least = max(1, round(model.token_s_at(num_tokens) / model.key_s)), targets.keys
    return min(max(keys, least), MOST_KEYS * least) if least else keys
