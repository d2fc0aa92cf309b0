"""A node of the coarse model: steps with prompts one by one, those of streams alone as many at once as are alike.

What a step has of prompts is what `StepBudget` gives them, with the model that a node fits to its steps at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush, nsmallest
from math import ceil, exp, inf
from typing import TYPE_CHECKING, NamedTuple

from pd_cluster.planning.device import HEAT_S, HEAVY_TOKENS, steps_at_start
from pd_cluster.scheduling.prefill_budget import LEAST_PROMPT_TOKENS, PrefillBudget
from pd_cluster.scheduling.queue_order import AGEING
from pd_cluster.scheduling.step_budget import DEBT, LOOKAHEAD, PATIENCE, RECOVERY, SPREAD
from pd_cluster.scheduling.step_model import MOST_TOKENS, StepModel, StepWork, keys_of
from pd_cluster.scheduling.stream_room import FADE_S, HELD, USUAL_CONTEXT
from pd_cluster.scheduling.targets import AIM, NEARLY_CHEAPEST
from pd_router.nodes.node_view import LEAST_STEP_TOKENS

if TYPE_CHECKING:
    from pd_cluster.planning.device import Device
    from pd_cluster.scheduling.targets import Targets

ROUGH_S = 1e-5  # of a step: times that are nearer are not told apart


class CoarseDevice:
    """What nodes of one kind share: their steps, and the model of them."""

    def __init__(self, device: Device) -> None:
        self.steps, self.model = device, StepModel(steps_at_start(device))
        self.token_s, self.key_s, self.context_s = self.model.token_s, self.model.key_s, self.model.context_s
        self._within, self._price_s, self.given = cache(self._tokens_within), cache(self._price), cache(self._given)

    def within(self, num_streams: int, seconds: float) -> int:
        """`StepModel.tokens_within`."""
        return self._within(num_streams, round(seconds / ROUGH_S))

    def pays(self, num_streams: int, num_tokens: int, longest: int, most: float = 1.0) -> bool:
        """Whether each of so many tokens of prompts costs at most `most` times its price in the longest step."""
        return num_tokens >= longest or (
            self._price_s(num_streams, num_tokens) <= most * self._price_s(num_streams, longest)
        )

    def pace(self, num_streams: int, num_tokens: int, share: float) -> float:
        """Tokens of prompts a second, if steps with so many of them have this share of the time."""
        return max(0.0, share) / self._price_s(num_streams, num_tokens)

    def budget(self, num_streams: int, most: int) -> PrefillBudget:
        return PrefillBudget.beside(num_streams, self.steps.step_tokens, most, self.keys(num_streams + most))

    def keys(self, num_tokens: int) -> int:
        """That cost as much as a token of a prompt in a step of so many."""
        return max(1, round(self.model.token_s_at(num_tokens) / self.key_s))

    def _given(self, num_streams: int, most: int) -> int:
        """The tokens of this budget."""
        return self.budget(num_streams, most).tokens_left

    def _price(self, num_streams: int, num_tokens: int) -> float:
        return self.model.prolonged_s(num_streams, num_tokens) / num_tokens

    def _tokens_within(self, num_streams: int, rough: int) -> int:
        return self.model.tokens_within(num_streams, rough * ROUGH_S)


@dataclass(slots=True, eq=False)
class CoarsePrompt:
    """`left`, `start`: its tokens to read, and those that are read. `since_s`: since when it waits for steps."""

    request: int
    came_s: float
    since_s: float
    left: int
    start: int = 0


class CoarseStream(NamedTuple):
    request: int
    num_tokens: int  # after the first
    context: int  # of a token, on average
    first_s: float  # when the client had the first token


class CoarseNode:
    """`prompts_first`: its streams take what prompts leave."""

    def __init__(self, device: CoarseDevice, targets: Targets, *, prompts_first: bool) -> None:
        self.device, self._steps, self._prompts_first = device, device.steps, prompts_first
        self._targets, self._tpot_s = targets, inf if prompts_first else targets.tpot_s
        self._mean_s, self._gap_s = AIM * self._tpot_s, AIM * targets.itl_s
        self.num_given, self.streams_s = 0, 0.0  # streams by the router's sum, and their time of a step
        self.queued = self.queued_keys = 0  # of prompts that are to be read
        self._taken = self._taken_keys = 0  # of these, by the step that runs
        self.end_s, self.version = inf, 0  # of the step that runs, or of the last of those alike
        self._begun_s, self._step_s, self._num = 0.0, 0.0, 0
        self._done: list[int] = []  # prompts with their last tokens in the step that runs
        self._reading: CoarsePrompt | None = None
        self._waiting: list[tuple[float, int, CoarsePrompt]] = []  # heap, as `Shortest` orders
        self._num_streams = self._context = self._tokens = 0  # tokens of a stream since the start
        self._alone_s = 0.0  # of a step of the streams
        self._joining: list[CoarseStream] = []  # from the next step on
        self._ends: list[tuple[int, int, int]] = []  # heap: the token at which it ends, request, context
        # By stream: when its first token came, less what its node's tokens up to then may take; and these. A heap too
        self._live: dict[int, tuple[float, int]] = {}
        self._slacks: list[tuple[float, int]] = []
        self._heat = (0.0, 0.0, 0.0)  # as a simulated node's
        self._num_without, self._bound_s = 0, -inf  # as a step budget's
        self._prompts_s, self._noted_s = 0.0, 0.0  # as a stream room's
        self._told: tuple[int, float, float, float, float] = (-1, 0.0, 0.0, 0.0, 0.0)

    # what the router knows

    @property
    def pace(self) -> tuple[int, float, float, float, float]:
        """Of which version, and `pace_of` what it tells, on average over the steps that run."""
        if self._told[0] != self.version:
            device = self.device
            token_s, key_s, most_s, most_keys_s = device.token_s, device.key_s, 0.0, 0.0
            if self._num_streams and self._tpot_s < inf:
                lasting = self._lasting()
                share_s = self._alone_s / lasting
                most_s, most_keys_s = token_s + self._alone_s / min(lasting, LEAST_STEP_TOKENS), key_s
                token_s, key_s = token_s + share_s, key_s + share_s / device.keys(self._num_streams + round(lasting))
            self._told = self.version, token_s, key_s, most_s or token_s, most_keys_s or key_s
        return self._told

    def reading_s(self, num_tokens: int) -> tuple[float, float]:
        """Seconds until this node has read what it was given, and of a prompt after it."""
        (_, token_s, key_s, most_s, most_key_s), keys, own = self.pace, self.queued_keys, num_tokens * num_tokens / 2
        queue_s, most_queue_s = self.queued * token_s + keys * key_s, self.queued * most_s + keys * most_key_s
        own_s, most_own_s = num_tokens * token_s + own * key_s, num_tokens * most_s + own * most_key_s
        return min(queue_s, most_queue_s), min(own_s, most_own_s)

    def is_late(self, now_s: float) -> bool:
        """Whether streams would miss their target with one more."""
        num, left = self.num_given + 1, 1.0
        context = self._context // self._num_streams if self._num_streams else USUAL_CONTEXT
        if self._prompts_first:
            left -= min(1.0, self._prompts_s * exp((self._noted_s - now_s) / FADE_S) / FADE_S)
        return self.device.model.decode_s(num, num * context) > HELD * left * self._targets.tpot_s

    # its work

    def read(self, request: int, num_tokens: int, now_s: float) -> None:
        place = now_s + self.device.model.prefill_s(num_tokens) / AGEING
        heappush(self._waiting, (place, request, CoarsePrompt(request, now_s, now_s, num_tokens)))
        self.queued += num_tokens
        self.queued_keys += keys_of(num_tokens, 0)

    def begin(self, stream: CoarseStream) -> None:
        self._joining.append(stream)

    def cut(self, now_s: float) -> None:
        """Something has come: of steps that are alike, run those that have begun."""
        num = max(1, ceil((now_s - self._begun_s) / self._step_s))
        if num < self._num:
            self._num, self.end_s = num, self._begun_s + num * self._step_s
            self.version += 1

    def end(self) -> tuple[list[int], list[int]]:
        """The requests of which prompts, and streams, end with the steps that run."""
        read, self._done, ended = self._done, [], list[int]()
        self.queued -= self._taken
        self.queued_keys -= self._taken_keys
        self._tokens += self._num
        while self._ends and self._ends[0][0] <= self._tokens:
            _, request, context = heappop(self._ends)
            self._live.pop(request, None)
            self._num_streams -= 1
            self._context -= context
            ended.append(request)
        return read, ended

    def plan(self, now_s: float) -> None:
        """Begin what comes next: after `end`, or where nothing runs."""
        self.version += 1
        self._begun_s, self._taken, self._taken_keys = now_s, 0, 0
        self._join()
        num, has_prompts = self._num_streams, self._reading is not None or bool(self._waiting)
        self._alone_s = self.device.model.decode_s(num, self._context) if num else 0.0
        if has_prompts:
            self._take(self._budget(now_s))
        else:
            self._bound_s = now_s
        tokens, self._num = self._taken, 0
        if tokens or num:
            self._num = 1 if has_prompts else self._ends[0][0] - self._tokens
        cool_s = self._steps.seconds(StepWork(num, self._context, tokens, self._taken_keys)) if self._num else 0.0
        self._step_s = cool_s * (1 + self._steps.heat * self._warmth(now_s, self._num * cool_s))
        self.end_s = now_s + self._num * self._step_s if self._num else inf
        if tokens and self._prompts_first:
            self._prompts_s *= exp((self._noted_s - now_s) / FADE_S)
            self._prompts_s, self._noted_s = self._prompts_s + self._step_s - self._alone_s, now_s

    def _join(self) -> None:
        for request, num_tokens, context, first_s in self._joining:
            heappush(self._ends, (self._tokens + num_tokens, request, context))
            self._num_streams += 1
            self._context += context
            if self._tpot_s < inf:
                own_s = first_s - self._mean_s * self._tokens
                self._live[request] = own_s, self._tokens
                heappush(self._slacks, (own_s, request))
        self._joining.clear()

    def _take(self, budget: PrefillBudget) -> None:
        """Give prompts their share of the step: the one that is read first, then those that wait."""
        while (one := self._reading or (self._waiting[0][2] if self._waiting else None)) and budget.admits(one.start):
            if self._reading is None:
                heappop(self._waiting)
                one.since_s = self._begun_s
            num = budget.take(one.start, one.left)
            self._taken += num
            self._taken_keys += keys_of(num, one.start)
            one.left, one.start = one.left - num, one.start + num
            self._reading = one if one.left else None
            if not one.left:
                self._done.append(one.request)
        self._num_without = 0 if self._taken else self._num_without + 1
        if budget.tokens_left:
            self._bound_s = self._begun_s

    def _warmth(self, now_s: float, seconds: float) -> float:
        """How hot the device is, on average over steps that are alike."""
        last_s, share, heat = self._heat
        stays = exp((last_s - now_s) / HEAT_S)
        heat = stays * heat + (1 - stays) * share
        self._heat = now_s, min(1.0, self._taken / HEAVY_TOKENS), heat
        return heat if self._num <= 1 else heat * (1 - exp(-seconds / HEAT_S)) * HEAT_S / seconds

    # the share of prompts, as in `step_budget.py`

    def _budget(self, now_s: float) -> PrefillBudget:
        device, num = self.device, self._num_streams
        if not num or self._gap_s == inf:
            return PrefillBudget.whole(self._steps.step_tokens - num)
        longest = device.within(num, self._gap_s - self._alone_s)
        if self._tpot_s == inf:
            return device.budget(num, longest)
        tokens, is_cheap, _ = self._most(self._slack_s(now_s), longest, now_s)
        since_s = now_s - PATIENCE * self._targets.ttft_s
        if self._bound_s < since_s and any(one.since_s < since_s for one in self._next()):
            tokens, is_cheap = longest, True
        if self._num_without:
            tokens = max(tokens, min(longest, (1 + self._num_without) * LEAST_PROMPT_TOKENS))
        if is_cheap or device.pays(num, device.given(num, tokens), self._useful(longest)):
            return device.budget(num, tokens)
        return PrefillBudget(is_limited=True)

    def _lasting(self) -> float:
        """`StepBudget.lasting` when a mean one of the steps that run ends."""
        num, ahead = self._num_streams, (self._num - 1) / 2
        end_s = self._begun_s + (ahead + 1) * self._step_s
        # The token of the step that is planned then is not counted yet: streams seem later by one
        slack_s = self._slack_s(end_s) + self._mean_s * ahead
        tokens, is_cheap, pace = self._most(slack_s, self.device.within(num, self._gap_s - self._alone_s), end_s)
        # No less either where streams fill the step: here their number has no bound
        return max(LEAST_PROMPT_TOKENS, self.device.given(num, tokens) if is_cheap else pace * self._alone_s)

    def _most(self, slack_s: float, longest: int, now_s: float) -> tuple[int, bool, float]:
        """Tokens of prompts that streams allow, whether these are cheap, and how many a second."""
        device, num, alone_s = self.device, self._num_streams, self._alone_s
        allowed_s, useful = self._allowed_s(slack_s / SPREAD), self._useful(longest)
        tokens = device.within(num, allowed_s - alone_s)
        pace = tokens / allowed_s
        is_cheap = device.pays(num, max(tokens, LEAST_PROMPT_TOKENS), useful, NEARLY_CHEAPEST)
        if not is_cheap:
            tokens = max(tokens, device.within(num, self._allowed_s(slack_s) - alone_s))
            pace = device.pace(num, useful, 1 - alone_s / self._mean_s)
        if self._is_late(now_s, pace) and (credit_s := slack_s + self._owed_s()) > 0:
            tokens = max(tokens, device.within(num, self._allowed_s(credit_s) - alone_s))
        return tokens, is_cheap, pace

    def _useful(self, longest: int) -> int:
        """Tokens of the longest useful step."""
        coming = sum(one.left for one in self._next()) or MOST_TOKENS
        return min(self.device.given(self._num_streams, longest), coming)

    def _allowed_s(self, slack_s: float) -> float:
        return min(self._gap_s, max(self._mean_s + slack_s, RECOVERY * self._mean_s))

    def _slack_s(self, now_s: float) -> float:
        """The least of all streams."""
        while self._slacks[0][1] not in self._live:
            heappop(self._slacks)
        return self._slacks[0][0] + self._mean_s * self._tokens - now_s

    def _owed_s(self) -> float:
        """By how much more than the least slack the least is with what each stream may owe."""
        least_s, tokens = self._slacks[0][0], self._tokens
        own_s, each_s = DEBT * AIM * self._tpot_s, (1 - AIM) * self._tpot_s
        return min(since_s - least_s + max(own_s, each_s * (tokens - at)) for since_s, at in self._live.values())

    def _next(self) -> list[CoarsePrompt]:
        first = [self._reading] if self._reading else []
        return first + [one for _, _, one in nsmallest(LOOKAHEAD - len(first), self._waiting)]

    def _is_late(self, now_s: float, pace: float) -> bool:
        before, left_s = 0, AIM * self._targets.ttft_s - now_s
        for one in self._next():
            before += one.left
            if before > pace * (one.came_s + left_s):
                return True
        return False
