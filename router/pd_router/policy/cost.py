"""What one prompt costs at each node: one sum in seconds for every choice of the router.

It goes to the last token: what the node has to do before this prompt, then what the node lacks of it, then the
handover; and what the answer and the streams where it decodes cost each other, in each step of all of them, by their
contexts and its expected length. Pure: reads nodes, changes none.
"""

from __future__ import annotations

from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from pd_connectors.protocol.feed import FAR
from pd_router.nodes.ledger import DECODE_S
from pd_router.nodes.node import Node, Role
from pd_router.nodes.node_view import TextRatio

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pd_router.policy.prompt_facts import PromptFacts

HANDOVER_S = 0.004  # from P's first token to the client's (two H200s, 8B: 3.6 to 4.1 ms)
LOOK_S = 0.002  # D-first: a decode node looks into its own cache before it asks a prefill node
TRANSFER_S = 1e-6  # for each token that is handed over: 128 KiB at 128 GB/s (8B) ...
CHUNK_TOKENS = 2048  # ... of the last step of a prefill node: the rest is read while it computes
LOCAL_TOKENS = 64  # a decode node asks no prefill node for fewer tokens (the nodes' --min-remote-tokens)
# The least saving for which a prompt leaves the prefill nodes: a step or two of each node, which no estimate includes.
# It was 20 ms while sums of decode nodes left out keys, which are a tenth of a prompt of 1,000 tokens
DOUBT_S = 0.015
# What a second in which a prompt is computed beside a stream costs, for each stream; and the share by which the paces
# of two equal nodes may be measured differently, so that no idle P is left for that, and idle nodes take turns. With 30
# streams a prompt costs a quarter of its own time more, the margin that was best in simulation (benchmarks/LOG.md).
STREAM_SHARE = 1 / 200
ERROR_FACTOR = 1.1
# Of a second of a stream, beside one until a first token. Where streams are alike the answer loses as much to them as
# they lose to it, so half of the sum is one of the two: 50 us a step at 1,200 tokens. `STREAM_SHARE` is beside that
STREAM_WEIGHT = 0.5
# STREAM_SHARE of what comes after FAR tokens of a prompt: its steps take four times as long as the decodes alone. With
# STREAM_SHARE 1P1D answered 1% fewer turns. It takes the part of the keys that these tokens see: by the context alone a
# fresh prompt of 16,384 tokens left a D with 20 streams two and a half times as late as one of 16,300
FAR_SHARE = 1 / 10
# Times as late as from a decode node a stream may have its tokens to go on at a prefill node, where all together gain.
# With 1.0 2P2D answered 3.76 turns a second, with this 3.79, with any 3.78 (simulated)
SLOWER = 1.2
# Streams of a router process that a prefill node keeps and has not told of yet. It tells within 10 ms. A quarter of its
# step holds some four of 40,000 tokens: eight routers that may send seven each make a step of 78 ms (8B, predicted)
MOST_UNTOLD = 1
MOST_BUSY = 0.9  # of a node's time, that prompts take: what a longer queue says of an answer is no more
FEW_NODES = 16  # so few are summed up sooner than compared
ENDING_S = 2.5  # of a sequence, in place of which another can run: 256 steps of 10 ms
TOKEN_S = 25e-6  # where no speed is known: then only ratios count
# Of a node without samples, as a share of the best prefill node's.
SPEEDS = {Role.PREFILL: 1.0, Role.MIXED: 1.0, Role.DECODE: 0.5}
_COUNTED = TextRatio()  # of tokens that were counted
_COUNTED.value = 1.0


class _BestPace(NamedTuple):
    """The least seconds for a prompt token at any node of a side, and those more for each token before it."""

    token_s: float
    key_s: float
    even_s: float  # up to this a pace counts as the best


class Costs:
    """Seconds of one prompt at the nodes, at one time. `prefills`, `decodes`: the nodes that may serve it.

    A pace counts as the best of its side if it differs from that by less than the error of the measurement: otherwise
    the same one of two equal nodes would get all prompts that find both idle.
    """

    __slots__ = (
        "_best_decoding", "_best_reading", "_cached", "_context", "_decodes", "_loads", "_lower", "_now_s",
        "_num_sequences", "_num_steps", "_num_units", "_prefills", "_prompt", "_ratio", "_reported_s", "_usual_s",
        "is_far",
    )  # fmt: skip

    def __init__(
        self, prompt: PromptFacts, prefills: Sequence[Node], now_s: float, decodes: Sequence[Node] = ()
    ) -> None:
        self._prompt = prompt
        # of which `_ratio` tokens are one, or, where it is None, the node's own ratio: bytes, or tokens themselves
        self._num_units = prompt.num_tokens or prompt.num_bytes
        self._ratio = _COUNTED if prompt.num_tokens else None
        self._num_sequences = prompt.num_sequences
        self._num_steps = STREAM_WEIGHT * prompt.num_output * prompt.num_sequences  # of all sequences of the answer
        self._context = prompt.num_output / 2 + (prompt.context_at(decodes[0]) if decodes else 0.0)  # of one of them
        self.is_far = self._context >= FAR
        self._cached, self._lower, self._loads = prompt.cached, prompt.lower, prompt.loads
        self._prefills, self._decodes = prefills, decodes
        self._now_s = now_s
        self._usual_s: float | None = None
        self._reported_s: float | None = None
        self._best_reading = self._best_pace(prefills)
        self._best_decoding = self._best_pace(decodes)

    def reading_s(self, node: Node) -> float:
        """Until the node has computed what it was given before, and this prompt."""
        return self.reading((node,))[0]

    def reading(self, nodes: Iterable[Node]) -> list[float]:
        """`reading_s` of each node."""
        return [queue_s + own_s for _, _, _, queue_s, own_s in self._sums(nodes, self._best_reading)]

    def reading_beside(self, nodes: Sequence[Node]) -> list[float]:
        """`reading`, and what that time costs the streams of each node. For a prompt that nothing follows."""
        reading_s = self.reading(nodes)
        return [s * (1 + STREAM_SHARE * node.view.num_sequences) for s, node in zip(reading_s, nodes, strict=True)]

    def queue_s(self, node: Node) -> float | None:
        """Until the node has computed what it was given. None: the speed of no prefill node is known."""
        if not self.knows_speed:
            return None
        load = node.view.ledger.total
        if load.token_s:
            return load.reading_s(load.queued_tokens, load.queued_keys)
        token_s, key_s = self._guessed_pace(node)
        return load.queued_tokens * token_s + load.queued_keys * key_s

    def first_token_s(self, node: Node) -> float | None:
        """Until the first token, if the node reads the prompt and goes on. None: no figures yet."""
        if _known_s(node, self._now_s) is None and not self.knows_speed:
            return None
        best = self._best_reading if node.role is Role.PREFILL else self._best_decoding
        _, cached, tokens, queue_s, own_s = next(self._sums((node,), best))
        load, total, num_sequences = node.view.load, node.view.ledger.total, self._num_sequences
        if load is None:
            has_room, steps_s = node.has_room(num_sequences), 0.0
        else:
            has_slots = total.num_sequences + num_sequences <= total.num_slots
            has_room = has_slots and total.free_tokens >= cached + tokens
            steps_s = load.step_s if load.step_tokens else 0.0  # half of a step waits, half is left over
        return queue_s + own_s + steps_s + (0.0 if has_room else self._room_s(node))

    def handing_over_s(self, node: Node) -> float:
        """From P's first token on, if this decode node goes on. It has the first token before it has room."""
        return self.decoding((node,))[0][0]

    def direct_s(self, node: Node) -> float:
        """The node reads the prompt itself, and holds its streams up for so long."""
        return self.decoding((node,))[0][1]

    def decoding(self, nodes: Iterable[Node]) -> list[tuple[float, float, bool]]:
        """`handing_over_s` and `direct_s` of each node, and whether the answer's sequences would run at once."""
        costs_s, num_sequences = [], self._num_sequences
        num_steps, context = self._num_steps, self._context
        for node, cached, tokens, queue_s, own_s in self._sums(nodes, self._best_decoding):
            load = node.view.ledger.total
            streams = load.num_sequences
            own_step_s = DECODE_S + load.context_s * context
            answer_s = num_steps * (load.streams_s + streams * own_step_s)
            if load.stream_room < num_sequences:  # each of them loses it, not the new one alone
                answer_s += num_steps * (streams + num_sequences) * own_step_s
            if node.view.load is None:
                has_room = node.has_room(num_sequences)
            else:
                has_slots = streams + num_sequences <= load.num_slots
                has_room = has_slots and load.free_tokens >= cached + tokens
            if not has_room:
                answer_s += self._room_s(node)
            moved_s = TRANSFER_S * (tokens if tokens < CHUNK_TOKENS else CHUNK_TOKENS)
            handing_over_s = HANDOVER_S + moved_s + STREAM_SHARE * queue_s + answer_s
            if self._loads:  # of its adapter, which a decode node loads in this time or waits for
                handing_over_s += self._loads.get(node, 0.0)
            share, end = STREAM_SHARE, cached + tokens
            if end > FAR:
                share += (FAR_SHARE - STREAM_SHARE) * min(1.0, (end**2 - FAR**2) / (end**2 - cached**2))
            direct_s = queue_s + own_s * (ERROR_FACTOR + share * streams) + answer_s
            costs_s.append((handing_over_s, direct_s, has_room))
        return costs_s

    def _sums(self, nodes: Iterable[Node], best: _BestPace) -> Iterator[tuple[Node, int, float, float, float]]:
        """Each node with the prompt's tokens that it has cached, those to compute, the seconds before these, and for
        these, with what it has to load first."""
        sums = self._computing(nodes, best)
        if not self._lower and not self._loads:
            return sums
        return (
            (node, cached, tokens, queue_s, own_s + self._loading_s(node))
            for node, cached, tokens, queue_s, own_s in sums
        )

    def _loading_s(self, node: Node) -> float:
        """For the adapter, and for the cached tokens that are not on the device: by the node's word, and never more
        than to compute them, which is what a node does that cannot load them sooner."""
        num_tokens, (token_s, key_s), load = self._lower.get(node, 0), self._pace(node), node.view.load
        computing_s = num_tokens * (token_s + (self._cached.get(node, 0) - num_tokens / 2) * key_s)
        loading_s = 0.0 if load is None else num_tokens * load.host_token_s
        return self._loads.get(node, 0.0) + (loading_s if 0.0 < loading_s < computing_s else computing_s)

    def _computing(self, nodes: Iterable[Node], best: _BestPace) -> Iterator[tuple[Node, int, float, float, float]]:
        """`_sums` without loads. One loop: for 100 nodes, calls would cost half as much as the sums."""
        (best_s, best_key_s, even_s), cached_of = best, self._cached.get
        num_units, own_ratio, last = self._num_units, self._ratio, None
        for node in nodes:
            view = node.view
            load = view.ledger.total
            token_s, key_s = load.token_s, load.key_s
            if not token_s:
                token_s, key_s = self._guessed_pace(node)
            if token_s <= even_s:
                token_s, key_s = best_s, best_key_s
            cached = cached_of(node, 0)
            ratio = own_ratio or view.ratio
            if cached or token_s is not best_s or ratio is not last:  # else the same as at the node before
                tokens = num_units * ratio.value - cached
                if tokens < 1.0:  # the prompt's last token is always computed
                    tokens = 1.0
                own_s = tokens * (token_s + (cached + tokens / 2) * key_s)
                last = None if cached or token_s is not best_s else ratio
            queue_s = load.queued_tokens * token_s + load.queued_keys * key_s
            if most_s := load.most_token_s:  # `LoadFigures.reading_s`, written out
                most_key_s, last = load.most_key_s, None
                most_own_s = tokens * (most_s + (cached + tokens / 2) * most_key_s)
                most_queue_s = load.queued_tokens * most_s + load.queued_keys * most_key_s
                own_s = own_s if own_s < most_own_s else most_own_s
                queue_s = queue_s if queue_s < most_queue_s else most_queue_s
            yield node, cached, tokens, queue_s, own_s

    def may_keep(self, node: Node) -> bool:
        """Whether the prefill node has memory for the answer to its end by its own word, which counts all that this
        router has sent there."""
        told, num_own = node.view.load, node.view.ledger.own_sequences + self._num_sequences
        return told is not None and num_own <= MOST_UNTOLD and told.kept_tokens >= self._prompt.most_context_at(node)

    def keeping(self, nodes: Sequence[Node], decode: Node, latest_s: float) -> list[float]:
        """Of prefill nodes, if they go on with the prompt, to the last token; inf where one does not keep it, or the
        client had its first token after `latest_s`, or the next ones much later than from this decode node."""
        costs_s, most_s = [], SLOWER * self.token_s(decode)
        sums = self._sums(nodes, self._best_reading)
        for (node, _, _, queue_s, own_s), (_, _, has_room) in zip(sums, self.decoding(nodes), strict=True):
            load = node.view.ledger.total
            lost_s = load.num_sequences * (DECODE_S + load.context_s * self._context)
            answer_s = self._num_steps * (load.streams_s + lost_s) + self.waiting_s(node, queue_s)
            keeps = has_room and self.may_keep(node) and self.token_s(node, queue_s) <= most_s
            is_soon = keeps and (first_s := self.first_token_s(node)) is not None and first_s <= latest_s
            costs_s.append(queue_s + own_s + answer_s if is_soon else inf)
        return costs_s

    def token_s(self, node: Node, queue_s: float = 0.0) -> float:
        """Of a token of the answer, if prompts take as much of the node's time as lately, and as what queues."""
        told, own_step_s = node.view.load, DECODE_S + node.view.ledger.total.context_s * self._context
        step_s = own_step_s + (0.0 if told is None else told.step_s)
        answer_s = 2 * self._num_steps * step_s
        return step_s / (1.0 - min(MOST_BUSY, max(told.prompts_share if told else 0.0, queue_s / (queue_s + answer_s))))

    def waiting_s(self, node: Node, queue_s: float = 0.0) -> float:
        """What the answer and the streams of the node wait for its prompts, with each token of theirs."""
        own_step_s = DECODE_S + node.view.ledger.total.context_s * self._context
        step_s = own_step_s + (0.0 if node.view.load is None else node.view.load.step_s)
        waits = self.token_s(node, queue_s) / step_s - 1.0
        return self._num_steps * waits * (step_s + node.view.num_sequences * own_step_s)

    def is_slower(self, node: Node) -> bool:
        """Whether the prefill node's pace is longer than the best one's by more than the error."""
        return node.view.ledger.total.token_s > self._best_reading.even_s

    def is_late(self, node: Node) -> bool:
        """Whether the node's streams would miss their target of time per token with this answer's sequences."""
        return node.view.ledger.total.stream_room < self._num_sequences

    def has_time(self, node: Node) -> bool:
        """Whether the node tells a target of time per token, and its streams meet it with this answer's sequences."""
        return self._num_sequences <= node.view.ledger.total.stream_room < inf

    def may_be_late(self, node: Node, fewest: int) -> bool:
        """Whether a late node may take the answer: its streams stay within the targets of `NodeLoad.late_room`, and it
        has at most `fewest` sequences then."""
        view, num_sequences = node.view, self._num_sequences
        return view.late_room >= num_sequences and view.num_sequences + num_sequences <= fewest

    def takers(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Those of `nodes`, in their order, that can have the least `handing_over_s`.

        The streams of each other one cost more than one node does in all. Of 500 nodes with up to 40 streams, 20 are
        left, in a fifth of the time of the sums.
        """
        if len(nodes) < FEW_NODES:
            return nodes
        num_steps, context = self._num_steps, self._context
        loads = [node.view.ledger.total for node in nodes]
        streams_s = [
            num_steps * (one.streams_s + one.num_sequences * (DECODE_S + one.context_s * context)) for one in loads
        ]
        least_s = self.handing_over_s(nodes[streams_s.index(min(streams_s))])
        return [node for node, cost_s in zip(nodes, streams_s, strict=True) if cost_s <= least_s]

    def least_direct_s(self, nodes: Sequence[Node]) -> float:
        """No `direct_s` of these nodes is less: what an idle one costs that has cached most of the prompt."""
        ratio = self._ratio or min({node.view.ratio for node in nodes}, key=attrgetter("value"))
        most_cached = max(self._cached.values(), default=0)
        return max(self._num_units * ratio.value - most_cached, 1.0) * self._best_decoding.token_s

    def asking_s(self, node: Node, prefill_s: float) -> float:
        """D-first: the node computes a short rest by itself, and asks a prefill node, which takes `prefill_s`, else."""
        if self._prompt.num_missing(node) < LOCAL_TOKENS:
            return LOOK_S + self.direct_s(node)
        return LOOK_S + prefill_s + self.handing_over_s(node)

    def _room_s(self, node: Node) -> float:
        """Until these sequences can run: at least an answer's time, since no router knows how long answers are."""
        load = node.view.load
        waiting = self._num_sequences if load is None else load.num_waiting + self._num_sequences
        return ENDING_S * max(1.0, waiting / max(1, node.view.num_sequences if load is None else load.num_running))

    @property
    def knows_speed(self) -> bool:
        """Whether the speed of a prefill node was measured or learned, or can be guessed from what others tell:
        otherwise no wait there can be estimated."""
        is_known = any(_known_s(node, self._now_s) is not None for node in self._prefills)
        return is_known or self._least_reported_s() > 0

    def _best_pace(self, nodes: Sequence[Node]) -> _BestPace:
        """Zeros without nodes."""
        best = (inf, 0.0)
        for node in nodes:
            token_s = node.view.ledger.total.token_s
            if not token_s or token_s <= best[0]:
                best = min(best, self._pace(node))
        token_s, key_s = best if nodes else (0.0, 0.0)
        return _BestPace(token_s, key_s, token_s * ERROR_FACTOR)

    def _pace(self, node: Node) -> tuple[float, float]:
        """Seconds for a prompt token, and for each token before it."""
        reported = node.view.ledger.reported
        return (reported.token_s, reported.key_s) if reported.token_s else self._guessed_pace(node)

    def _guessed_pace(self, node: Node) -> tuple[float, float]:
        """Of a node that tells none: what others tell if it has a feed, else as learned, or by the best prefill node.

        With a feed it tells its own after few prompts. What was learned from its legs is no measure beside what others
        tell of their steps: 422 us a token of a busy machine stood for minutes beside the 250 that an equal D reported.
        """
        if not self._prefills:  # equals take turns, however their few samples differ
            return TOKEN_S / SPEEDS[node.role], 0.0
        if node.view.load is not None and (reported_s := self._least_reported_s()):
            return reported_s / SPEEDS[node.role], 0.0
        per_byte = node.view.ratio.value
        guess = SPEEDS[node.role] / (self._usual() * per_byte)
        return 1.0 / ((node.speed.at(self._now_s, guess=guess) or guess) * per_byte), 0.0

    def _least_reported_s(self) -> float:
        """The least seconds for a token that a prefill node tells, or, if none does, a decode node; 0: none tells."""
        if self._reported_s is None:
            sides = [[node.view.ledger.reported.token_s for node in side] for side in (self._prefills, self._decodes)]
            self._reported_s = min(filter(None, sides[0]), default=0.0) or min(filter(None, sides[1]), default=0.0)
        return self._reported_s

    def _usual(self) -> float:
        """Seconds for a token at the best prefill node."""
        if self._usual_s is None:
            known = (_known_s(node, self._now_s) for node in self._prefills)
            self._usual_s = min((token_s for token_s in known if token_s is not None), default=TOKEN_S)
        return self._usual_s


def _known_s(node: Node, now_s: float) -> float | None:
    """Seconds for a token, measured or learned. None: neither."""
    if token_s := node.view.ledger.reported.token_s:
        return token_s
    speed = node.speed.at(now_s)
    return None if speed is None else 1.0 / (speed * node.view.ratio.value)
