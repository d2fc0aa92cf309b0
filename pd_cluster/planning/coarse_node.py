"""A node of the coarse model: steps with prompts one by one, those of streams alone as many at once as are alike.

What a step has of prompts is what `StepBudget` gives them, with the model that a node fits to its steps at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from math import ceil, exp, inf
from typing import TYPE_CHECKING, NamedTuple

from pd_cluster.planning.device import HEAT_S, DeviceHeat
from pd_cluster.scheduling.prefill_budget import LEAST_PROMPT_TOKENS, PrefillBudget
from pd_cluster.scheduling.queue_order import AGEING
from pd_cluster.scheduling.step_budget import DEBT, LOOKAHEAD, PATIENCE
from pd_cluster.scheduling.step_model import StepWork, keys_of
from pd_cluster.scheduling.stream_room import FADE_S, HELD, USUAL_CONTEXT
from pd_cluster.scheduling.streamed_step import StreamedStep, keys_per_token
from pd_cluster.scheduling.targets import AIM
from pd_connectors.protocol.feed import NodeLoad
from pd_router.nodes.ledger import LoadFigures
from pd_router.nodes.node_view import pace_of

if TYPE_CHECKING:
    from pd_cluster.planning.device import Device
    from pd_cluster.scheduling.step_model import StepModel
    from pd_cluster.scheduling.targets import Targets


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
    """`model`: of the device's steps at start. `prompts_first`: its streams take what prompts leave."""

    def __init__(self, device: Device, model: StepModel, targets: Targets, *, prompts_first: bool) -> None:
        self.model, self._steps, self._prompts_first = model, device, prompts_first
        self.token_s = model.token_s
        self._targets, self._tpot_s = targets, inf if prompts_first else targets.tpot_s
        self._mean_s = AIM * self._tpot_s
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
        self._heat = DeviceHeat()
        self._num_without, self._bound_s = 0, -inf  # as a step budget's
        self._prompts_s, self._noted_s = 0.0, 0.0  # as a stream room's
        self._told = -1, LoadFigures()  # of which version

    # what the router knows

    @property
    def told(self) -> LoadFigures:
        """What the router reads of the node's word, on average over the steps that run."""
        if self._told[0] != self.version:
            share = self._lasting() if self._num_streams and self._tpot_s < inf else 0
            keys = keys_per_token(self._targets, self.model, self._num_streams + share) if share else 0
            load = NodeLoad(
                token_s=self.token_s, key_s=self.model.key_s, step_s=self._alone_s, step_tokens=share, step_keys=keys
            )
            self._told = self.version, LoadFigures(*pace_of(load))
        return self._told[1]

    def reading_s(self, num_tokens: int) -> tuple[float, float]:
        """Seconds until this node has read what it was given, and of a prompt after it."""
        told = self.told
        return told.reading_s(self.queued, self.queued_keys), told.reading_s(num_tokens, num_tokens * num_tokens / 2)

    def is_late(self, now_s: float) -> bool:
        """Whether streams would miss their target with one more."""
        num, left = self.num_given + 1, 1.0
        context = self._context // self._num_streams if self._num_streams else USUAL_CONTEXT
        if self._prompts_first:
            left -= min(1.0, self._prompts_s * exp((self._noted_s - now_s) / FADE_S) / FADE_S)
        return self.model.decode_s(num, num * context) > HELD * left * self._targets.tpot_s

    # its work

    def read(self, request: int, num_tokens: int, now_s: float) -> None:
        place = now_s + self.model.prefill_s(num_tokens) / AGEING
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
        self._alone_s = self.model.decode_s(num, self._context) if num else 0.0
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
        self._heat = self._heat.at(now_s, self._taken)
        heat = self._heat.value
        return heat if self._num <= 1 else heat * (1 - exp(-seconds / HEAT_S)) * HEAT_S / seconds

    # the share of prompts, as `StepBudget` decides it

    def _budget(self, now_s: float) -> PrefillBudget:
        if not self._num_streams or self._targets.itl_s == inf:
            return PrefillBudget.whole(self._steps.step_tokens - self._num_streams)
        prompts, has_slack = self._next(), self._tpot_s < inf
        step = self._look(now_s, self._slack_s(now_s) if has_slack else 0.0, prompts)
        if not has_slack:
            return step.share_of(step.most)
        most, is_cheap, _ = self._most(step, prompts)
        since_s = now_s - PATIENCE * self._targets.ttft_s
        if self._bound_s < since_s and any(one.since_s < since_s for one in prompts):
            most, is_cheap = step.most, True
        return step.share(most, is_cheap=is_cheap, num_without=self._num_without)

    def _lasting(self) -> int:
        """`StepBudget.lasting` when a mean one of the steps that run ends."""
        ahead, prompts = (self._num - 1) / 2, self._next()
        end_s = self._begun_s + (ahead + 1) * self._step_s
        # The token of the step that is planned then is not counted yet: streams seem later by one
        step = self._look(end_s, self._slack_s(end_s) + self._mean_s * ahead, prompts)
        most, is_cheap, pace = self._most(step, prompts)
        # No less either where streams fill the step: here their number has no bound
        return max(LEAST_PROMPT_TOKENS, step.given(most) if is_cheap else round(pace * self._alone_s))

    def _look(self, begin_s: float, slack_s: float, prompts: list[CoarsePrompt]) -> StreamedStep:
        num, most = self._num_streams, self._steps.step_tokens
        num_waiting = sum(one.left for one in prompts)
        return StreamedStep(self.model, self._targets, num, most, begin_s, self._alone_s, slack_s, num_waiting)

    def _most(self, step: StreamedStep, prompts: list[CoarsePrompt]) -> tuple[int, bool, float]:
        most, is_cheap, pace = step.by_slack()
        is_late = step.is_late(((one.came_s, one.left) for one in prompts), pace)
        if is_late and (credit_s := step.slack_s + self._owed_s()) > 0:
            most = max(most, step.within(credit_s))
        return most, is_cheap, pace

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
