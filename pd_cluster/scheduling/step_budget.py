"""How much of a step prompts may take: by a fixed limit, or by what the streams beside them may wait.

**Slack.** With a target of `tpot_s` a stream's token is due `tpot_s` after the one before it was due; the first was due
when it came. The slack of a stream is how far its tokens are ahead of that when the planned step begins, which is when
the steps under way will have ended. With `tpot` = AIM x tpot_s, and the least slack of all streams, the step may take

    slack >= 0    tpot + slack / SPREAD
    slack < 0     tpot + slack / SPREAD, but not under RECOVERY x tpot: a late stream catches up over some tens of
                  tokens, and prompts go on meanwhile
    a late prompt tpot + slack + DEBT x tpot while that is longer: a prompt would miss its TTFT target
    always        AIM x itl_s at most

as the StepModel predicts. Prompts get the tokens that fit between the decodes alone and that, in captured sizes. They
get LEAST_PROMPT_TOKENS whatever that takes, as under a fixed limit: where decodes alone miss the target, prompts crawl
and do not starve. The price of a token rises with the step (8B on an H200: 8 us up to 128 tokens in all, 22 beyond
256), so slack is spent evenly unless time is short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf
from typing import TYPE_CHECKING, Protocol, Self

from pd_cluster.scheduling.prefill_budget import STEP_MULTIPLE, PrefillBudget
from pd_cluster.scheduling.sequence import SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.config import SchedulerConfig
    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Sequence
    from pd_cluster.scheduling.step_model import StepModel

AIM = 0.95  # of a target: predictions are some percent off
SPREAD = 4  # steps over which slack is spent, or won back
# Tokens that streams may be late for the sake of a late prompt. With 4, answers of 20 to 60 tokens on one crowded node
# missed a TPOT of 10 ms (simulated: 14 of 24 requests met both targets; with 2 it is 19, with 0 it is 18)
DEBT = 2
RECOVERY = 0.8  # of the target: the shortest step for the sake of a late stream
LOOKAHEAD = 8  # prompts, in their order, that are compared with their TTFT target
COARSE = 512  # tokens from which captured sizes are two STEP_MULTIPLEs apart


class StepBudget(Protocol):
    """Decides the share of prompts in steps beside decodes. `step_tokens`: of the last such step; 0: not limited."""

    step_tokens: int

    def beside(self, num_decodes: int, num_entering: int, max_num_tokens: int, queues: Queues) -> PrefillBudget:
        """The share of a step of at most `max_num_tokens` with `num_decodes` decodes, which are planned.

        `num_entering` of them are the first of `queues.loaded`, which enter in this step. There may be none: then a
        parked request will decode soon.
        """


@dataclass(slots=True)
class FixedBudget:
    """A fixed limit, see `PrefillBudget.beside`. limit 0: none."""

    limit: int = 0
    keys_per_token: int = 0
    step_tokens: int = 0

    def beside(self, num_decodes: int, num_entering: int, max_num_tokens: int, queues: Queues) -> PrefillBudget:
        share = PrefillBudget.beside(num_decodes, max_num_tokens, self.limit, self.keys_per_token)
        self.step_tokens = share.cost_left if share.is_limited else 0
        return share


@dataclass(frozen=True, slots=True)
class Targets:
    """What clients may wait, in seconds. inf: no target."""

    ttft_s: float = inf
    tpot_s: float = inf
    itl_s: float = inf

    @classmethod
    def of(cls, config: SchedulerConfig) -> Self:
        itl_ms = config.slo_itl_ms or 3 * config.slo_tpot_ms
        return cls(*((ms / 1e3 or inf) for ms in (config.slo_ttft_ms, config.slo_tpot_ms, itl_ms)))

    @property
    def of_gaps(self) -> Targets:
        """Without that of the time per token: streams take what prompts leave of it."""
        return replace(self, tpot_s=inf)


class SlackBudget:
    """By the streams' slack. `busy_s`: predicted seconds until every step under way has ended."""

    def __init__(
        self, targets: Targets, model: StepModel, clock: Callable[[], float], busy_s: Callable[[], float]
    ) -> None:
        self.targets = targets
        self._model = model
        self._clock = clock
        self._busy_s = busy_s
        self.step_tokens = 0

    def beside(self, num_decodes: int, num_entering: int, max_num_tokens: int, queues: Queues) -> PrefillBudget:
        model, begin_s = self._model, self._clock() + self._busy_s()
        streams = [seq for seq in queues.running if is_stream(seq)]
        streams += islice(queues.loaded, num_entering)
        alone_s = model.decode_s(num_decodes, sum(len(seq.token_ids) for seq in streams))
        slack_s = self._slack_s(streams, begin_s)
        allowed_s = self._allowed_s(slack_s / SPREAD)
        most = model.tokens_within(num_decodes, allowed_s - alone_s)
        debt_s = 0.0 if self.targets.tpot_s == inf else DEBT * AIM * self.targets.tpot_s
        if slack_s + debt_s > 0 and self._is_late(queues, begin_s, most / allowed_s):
            most = max(most, model.tokens_within(num_decodes, self._allowed_s(slack_s + debt_s) - alone_s))
        return self._share(num_decodes, max_num_tokens, most)

    def _share(self, num_decodes: int, max_num_tokens: int, most: int) -> PrefillBudget:
        """The share of prompts: `most` tokens if they have none before them, and what fits a captured size."""
        model, limit = self._model, num_decodes + most
        keys_per_token = max(1, round(model.token_s_at(limit) / model.key_s))
        limit -= limit % (STEP_MULTIPLE if limit < COARSE else 2 * STEP_MULTIPLE)
        share = PrefillBudget.beside(num_decodes, max_num_tokens, max(1, limit), keys_per_token, is_lowered=False)
        self.step_tokens = share.tokens_left = min(share.tokens_left, share.cost_left)
        share.cost_left = max(share.cost_left, most)
        return share

    def _slack_s(self, streams: list[Sequence], begin_s: float) -> float:
        """The least slack at the beginning of the planned step. A stream without a token yet has none."""
        tpot_s = AIM * self.targets.tpot_s
        if tpot_s == inf or not streams:
            return 0.0
        return min(
            0.0 if (since_s := seq.request.marks.stream_s) is None else since_s + tpot_s * num_due(seq) - begin_s
            for seq in streams
        )

    def _allowed_s(self, slack_s: float) -> float:
        """The longest step that takes so much of the streams' slack."""
        tpot_s, itl_s = AIM * self.targets.tpot_s, AIM * self.targets.itl_s
        return itl_s if tpot_s == inf else min(itl_s, max(tpot_s + slack_s, RECOVERY * tpot_s))

    def _is_late(self, queues: Queues, begin_s: float, pace: float) -> bool:
        """Whether one of the next prompts misses its target at a pace of so many tokens a second."""
        if self.targets.ttft_s == inf:
            return False
        num_before = 0
        prompts = (seq for seq in chain(queues.running, queues.waiting) if seq.request.marks.stream_s is None)
        for seq in islice(prompts, LOOKAHEAD):
            num_before += seq.num_remaining_tokens
            due_s = seq.request.marks.arrived_s + AIM * self.targets.ttft_s
            if num_before > pace * (due_s - begin_s):
                return True
        return False


def is_stream(seq: Sequence) -> bool:
    """Whether a running sequence has one token to compute, for a client that has seen the one before it."""
    return seq.num_remaining_tokens <= 1 and seq.num_output_tokens + seq.num_pending > 1


def num_due(seq: Sequence) -> int:
    """Tokens since the stream's first that are to be out when the planned step begins."""
    is_planned = seq.status is SequenceStatus.RUNNING  # its token of this step is pending already
    return seq.num_output_tokens + seq.num_pending - seq.num_given_tokens - 1 - is_planned
