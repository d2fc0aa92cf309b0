"""How much of a step prompts may take: what the streams beside them may wait.

**Gaps.** A step may take so long (`Targets.itl_s`), and the StepModel says how many tokens of prompts fit beside its
decodes. Where this is all that is known of what clients want, prompts get all of it.

**Slack.** With a target of `tpot_s` a stream's token is due `tpot_s` after the one before it was due; the first was due
when it came. The slack of a stream is how far its tokens are ahead of that when the planned step begins, which is when
the steps under way will have ended. With `tpot` = AIM x tpot_s, and the least slack of all streams, the step may take

    slack >= 0    tpot + slack / SPREAD
    slack < 0     tpot + slack / SPREAD, but not under RECOVERY x tpot: the stream catches up over some tens of
                  tokens, and prompts go on meanwhile
    a late prompt tpot + slack + debt while that is longer: a prompt would miss its TTFT target. The debt of a stream is
                  DEBT x tpot, or what the target leaves beyond AIM for all of its tokens, if that is more
    always        AIM x itl_s at most

as the StepModel predicts. Prompts get the tokens that fit between the decodes alone and that, in captured sizes. They
get LEAST_PROMPT_TOKENS whatever that takes.

**Overload.** Where nodes have more to do than fits the targets, slack would leave prompts hardly any time: two replicas
with half more streams than they could decode in 10 ms a token had a median TTFT of 13 s, and TPOT 10.0. So while one of
the next prompts has waited PATIENCE x ttft_s, prompts get all that the last line above allows, and streams become as
slow as they must. Only waits for this budget count: a step in which all slots are taken, or which leaves some of the
prompts' share, begins them anew. A prompt of a worse priority than the best stream's does not count.

**Saving.** The price of a dense model's token rises with the step (8B on an H200: 8 us up to 128 tokens in all, 22
beyond 256), so slack is spent evenly unless time is short. A mixture reads nearly all experts for the first tokens:
5 decodes of Qwen3-30B-A3B take 4.2 ms, with 64 tokens of a prompt 10.1, with 2,043 25.8. There small shares spend all
slack on experts, and prompts starve. So where a token costs over NEARLY_CHEAPEST times its price in the longest useful
step (all that wait, or AIM x itl_s), prompts get nothing until one step may take

    tpot + slack, all at once; for a late prompt as above; LEAST_PROMPT_TOKENS for each step since their last

and a token costs no more in it than in the longest useful one. The last line bounds the wait, by the longest step /
LEAST_PROMPT_TOKENS steps. A step without decodes does not wait.
"""

from __future__ import annotations

from itertools import chain, islice
from math import inf
from typing import TYPE_CHECKING

from pd_cluster.scheduling.prefill_budget import LEAST_PROMPT_TOKENS, PrefillBudget
from pd_cluster.scheduling.sequence import SequenceStatus
from pd_cluster.scheduling.streamed_step import SPREAD, StreamedStep, allowed_s, keys_per_token
from pd_cluster.scheduling.targets import AIM, KEPT_GAP_S
from pd_connectors.protocol.feed import FAR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Sequence
    from pd_cluster.scheduling.step_model import StepModel
    from pd_cluster.scheduling.targets import Targets

# Tokens by which streams may miss their target for a prompt that would miss its own. With 4, answers of 20 to 60
# tokens on one crowded node missed a TPOT of 10 ms (simulated: 14 of 24 requests met both targets; with 2 it is 19,
# with 0 it is 18)
DEBT = 2
PATIENCE = 4  # TTFT targets that a prompt waits for the sake of streams
CONTEXT_STEP = 1024  # tokens of a stream by which limits are found anew
LOOKAHEAD = 8  # prompts, in their order, that are compared with their TTFT target


class StepBudget:
    """Decides the share of prompts in steps beside decodes. `busy_s`: predicted seconds until all steps have ended."""

    def __init__(
        self, targets: Targets, model: StepModel, clock: Callable[[], float], busy_s: Callable[[], float]
    ) -> None:
        self.targets = targets
        self.model = self._live = model
        self._clock = clock
        self._busy_s = busy_s
        self._share = PrefillBudget(num_given=1)  # of the last step
        self._num_without = 0  # steps in a row, up to the last, without a prompt's token
        self._bound_s = -inf  # since when prompts have waited for nothing else
        self._usual = ((-1, -1, -1), (0, 0, 0))  # decodes, revision of the model; what `_usual_limits` says

    def beside(self, num_decodes: int, num_entering: int, max_num_tokens: int, queues: Queues) -> PrefillBudget:
        """The share of a step of at most `max_num_tokens` with `num_decodes` decodes, which are planned.

        `num_entering` of them are the first of `queues.loaded`, which enter in this step. There may be none: then a
        parked request will decode soon.
        """
        if self.targets.tpot_s == inf:
            self._bound_s = self._clock()  # prompts have all that they may, and wait for no stream
            self._share = self._within_gaps(num_decodes, num_entering, max_num_tokens, queues)
            return self._share
        self._num_without = 0 if self._share.num_given else self._num_without + 1
        if queues.num_free_slots <= 0 or self._share.tokens_left:
            self._bound_s = self._clock()
        step, most, is_cheap, _ = self._look(num_decodes, num_entering, max_num_tokens, queues)
        if self._is_overloaded(queues, step.begin_s):
            most, is_cheap = step.most, True
        may_wait = num_decodes > num_entering  # else the step might be empty, and no other would follow
        self._share = step.share(most, is_cheap=is_cheap, num_without=self._num_without, may_wait=may_wait)
        return self._share

    def lasting(self, num_decodes: int, max_num_tokens: int, queues: Queues) -> int:
        """The prompt tokens that a step takes at present beside the decodes, on average. 0: not limited."""
        if self.targets.tpot_s == inf:
            share = self._within_gaps(num_decodes, 0, max_num_tokens, queues)
            return max(1, share.tokens_left) if share.is_limited else 0
        step, most, is_cheap, pace = self._look(num_decodes, 0, max_num_tokens, queues)
        return step.given(most) if is_cheap else max(LEAST_PROMPT_TOKENS, round(pace * step.alone_s))

    def step_keys(self, num_running: int, num_tokens: int) -> int:
        """`NodeLoad.step_keys` of the share that `lasting` said last: a prompt's first tokens, and those behind as many
        as the streams have, get what they get. 0: the same.
        """
        (_, _, steps), (_, keys, cost) = self._usual
        if cost <= num_tokens:
            return keys if keys and not cost else keys_per_token(self.targets, self.model, num_running + num_tokens)
        context = steps * CONTEXT_STEP
        dearer = num_tokens * (keys + context) / (cost * keys)
        return round(context / (dearer - 1.0)) if dearer > 1.0 else 0

    def most_with_drafts_s(self, queues: Queues) -> tuple[float, float]:
        """The longest planned step with drafts, and the longest while some stream has none. inf: no target of it.

        The latter takes what the slack of streams leaves. What is usual for gaps (`Targets.on`) is about prompts.
        """
        targets = self.targets
        if targets.context:
            return inf, inf
        if targets.tpot_s == inf:
            return AIM * targets.itl_s, inf
        slack_s, _ = self._slack_s(_streams(queues, 0), self._clock() + self._busy_s())
        return AIM * targets.itl_s, allowed_s(targets, slack_s / SPREAD)

    @property
    def _revision(self) -> int:
        return self.model.revision + self._live.revision

    def _within_gaps(self, num_decodes: int, num_entering: int, max_num_tokens: int, queues: Queues) -> PrefillBudget:
        """All that the target of gaps allows."""
        targets = self.targets
        if targets.itl_s == inf:
            return PrefillBudget.whole(max_num_tokens - num_decodes)
        limits: tuple[int, ...]
        if not targets.context:
            limits = self._limits(num_decodes, _context_of(_streams(queues, num_entering)))
        else:
            context = queues.mean_context  # of prompts too, which may be all that is far
            if context >= FAR and min((len(seq.token_ids) for seq in _streams(queues, num_entering)), default=0) < FAR:
                context = FAR - 1
            key = num_decodes, self._revision, context // CONTEXT_STEP
            if self._usual[0] != key:  # 1 us for 9
                self._usual = key, self._usual_limits(num_decodes, context)
            limits = self._usual[1]
        return PrefillBudget.beside(num_decodes, max_num_tokens, *limits)

    def _usual_limits(self, num_decodes: int, context: int) -> tuple[int, int, int]:
        """Beside FAR streams as on a prefill node that keeps them: KEPT_GAP_S, by steps of late, if that is no less.

        Else as beside streams of the usual context, and the cost of as many tokens of a prompt behind `context` others,
        as each stream has, as behind the usual ones: else long streams starve prompts like theirs. In a step within
        KEPT_GAP_S, if that leaves no less.
        """
        usual, model = self.targets.context, self.model
        most, keys = self._limits(num_decodes, usual * num_decodes)
        if context >= FAR:
            far = self._limits(num_decodes, context * num_decodes, KEPT_GAP_S, self._live)
            if far[0] >= most:
                return *far, 0
        within = model.tokens_within(num_decodes, AIM * KEPT_GAP_S - model.decode_s(num_decodes, context * num_decodes))
        return most, keys, min(within, round(most * (keys + context) / (keys + usual)))

    def _limits(
        self, num_decodes: int, context: int, itl_s: float = 0.0, model: StepModel | None = None
    ) -> tuple[int, int]:
        """Tokens of prompts within this bound, or the target of gaps, and the keys that cost as much as one of them."""
        model = model or self.model
        most_s = AIM * (itl_s or self.targets.itl_s) - model.decode_s(num_decodes, context)
        most = model.tokens_within(num_decodes, most_s)
        return most, keys_per_token(self.targets, model, num_decodes + most)

    def _look(
        self, num_decodes: int, num_entering: int, max_num_tokens: int, queues: Queues
    ) -> tuple[StreamedStep, int, bool, float]:
        """The step, and `StreamedStep.by_slack` of it, or more for a late prompt."""
        model, begin_s = self.model, self._clock() + self._busy_s()
        streams = _streams(queues, num_entering)
        alone_s, (slack_s, credit_s) = (
            model.decode_s(num_decodes, _context_of(streams)),
            self._slack_s(streams, begin_s),
        )
        prompts = (seq for seq in chain(queues.running, queues.waiting) if seq.num_remaining_tokens > 1)
        num_waiting = sum(seq.num_remaining_tokens for seq in islice(prompts, LOOKAHEAD))
        step = StreamedStep(model, self.targets, num_decodes, max_num_tokens, begin_s, alone_s, slack_s, num_waiting)
        most, is_cheap, pace = step.by_slack()
        coming = ((seq.request.marks.arrived_s, seq.num_remaining_tokens) for seq in _next_prompts(queues))
        if credit_s > 0 and self.targets.ttft_s < inf and step.is_late(coming, pace):
            most = max(most, step.within(credit_s))
        return step, most, is_cheap, pace

    def _slack_s(self, streams: list[Sequence], begin_s: float) -> tuple[float, float]:
        """The least slack when the planned step begins, and the least with what a stream may owe.

        A stream without a token yet has none.
        """
        tpot_s = self.targets.tpot_s
        slack_s, credit_s = [], []
        for seq in streams:
            since_s, num = seq.request.marks.stream_s, num_due(seq)
            slack_s.append(0.0 if since_s is None else since_s + AIM * tpot_s * num - begin_s)
            credit_s.append(slack_s[-1] + max(DEBT * AIM, (1 - AIM) * num) * tpot_s)
        return min(slack_s, default=0.0), min(credit_s, default=DEBT * AIM * tpot_s)

    def _is_overloaded(self, queues: Queues, begin_s: float) -> bool:
        """Whether one of the next prompts has waited longer for streams than they may make it wait."""
        if self.targets.ttft_s == inf:
            return False
        # A stream that goes on after a node's failure has a priority better by one
        best = 1 + min((seq.priority for seq in queues.running if is_stream(seq)), default=0)
        since_s = begin_s - PATIENCE * self.targets.ttft_s
        return self._bound_s < since_s and any(
            _waits_since_s(seq) < since_s and seq.priority <= best
            for seq in _next_prompts(queues)
            if seq.num_remaining_tokens > 1
        )


def _streams(queues: Queues, num_entering: int) -> list[Sequence]:
    return [*filter(is_stream, queues.running), *islice(queues.loaded, num_entering)]


def _context_of(streams: list[Sequence]) -> int:
    return sum(len(seq.token_ids) for seq in streams)


def _next_prompts(queues: Queues) -> Iterator[Sequence]:
    """The next of those that have not shown a token yet."""
    prompts = (seq for seq in chain(queues.running, queues.waiting) if seq.request.marks.stream_s is None)
    return islice(prompts, LOOKAHEAD)


def _waits_since_s(seq: Sequence) -> float:
    """Since when a prompt has waited for steps: one that runs, since its first."""
    marks = seq.request.marks
    return marks.arrived_s if marks.scheduled_s is None else marks.scheduled_s


def is_stream(seq: Sequence) -> bool:
    """Whether a running sequence has one token to compute, for a client that has seen the one before it."""
    return seq.num_remaining_tokens <= 1 and seq.num_output_tokens + seq.num_pending > 1


def num_due(seq: Sequence) -> int:
    """Tokens since the stream's first that are to be out when the planned step begins."""
    is_planned = seq.status is SequenceStatus.RUNNING  # its token of this step is pending already
    return seq.num_output_tokens + seq.num_pending - seq.num_given_tokens - 1 - is_planned
