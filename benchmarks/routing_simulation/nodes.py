"""Simulated nodes: a prefix cache, a queue of prompts, and steps with decodes, as an 8B shape on an H200."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.routing_simulation.trace import BLOCK_TOKENS, SimRequest
from pd_cluster.scheduling.prefill_budget import PrefillBudget
from pd_connectors.protocol.feed import NodeLoad, StoredBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pd_cluster.planning.event_queue import EventQueue

Ended: TypeAlias = "Callable[[Sequence[float]], None]"  # an answer is complete: ends of its steps, but for the prompt's

# A prefill node: fitted to 46,400, 44,000 and 36,200 tokens/s for prompts of 1k, 4k and 15k tokens.
TOKEN_S, KEY_S = 21.1e-6, 0.87e-9
# A decode node: 5.5 ms with 30 decodes of 1,200 tokens, 7.2 with 60; a prompt's token beside them 11 us, twice that
# behind 6,000 of its own prompt; 1.3 ms for a step that holds any (benchmarks/LOG.md).
STEP_S, DECODE_S, CONTEXT_S = 0.0042, 1e-5, 3.3e-8
BESIDE_S, BESIDE_KEY_S, PROMPTS_S = 11e-6, 1.8e-9, 0.0013
STEP_TOKENS, LEAST_TOKENS = 192, 32  # of a step with decodes: in all, and for prompts at least
STEP_KEYS = 6000  # a prompt's token after so many counts as two of them (`ModelSpec.keys_per_token`)
WHOLE_TOKENS = 2048  # of a decode node's step without decodes
AGEING = 0.25  # shortest-first: a prompt counts as shorter by this share of the time that it has waited


def prefill_s(num_tokens: float, num_cached: float) -> float:
    """Seconds that a prefill node computes."""
    new = num_tokens - num_cached
    return TOKEN_S * new + KEY_S * new * (num_cached + new / 2)


class LruBlocks:
    """A prefix cache that forgets the least recently used block; of a prompt the last block first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, int] = OrderedDict()  # name -> tokens up to its end

    def match(self, blocks: Iterable[int]) -> int:
        """Tokens of the longest stored prefix."""
        num_tokens = 0
        for name in blocks:
            if name not in self._blocks:
                break
            num_tokens = self._blocks[name]
        return num_tokens

    def put(self, blocks: tuple[int, ...]) -> tuple[list[StoredBlock], list[int]]:
        """What is new, and what was forgotten for it."""
        stored = []
        for place in range(min(len(blocks), self._capacity), 0, -1):
            name = blocks[place - 1]
            if name in self._blocks:
                self._blocks.move_to_end(name)
            else:
                self._blocks[name] = place * BLOCK_TOKENS
                stored.append(StoredBlock(name, name, place * BLOCK_TOKENS))
        evicted = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._capacity)]
        return stored, evicted


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt on a node. `done` is called when its first token is there."""

    arrival: SimRequest
    came_s: float
    done: Callable[[], None]
    ended: Ended | None = None  # None: another node decodes
    cached: int = 0  # tokens, when it began; until then, when it came
    computed: int = 0  # tokens, of those that were not cached

    @property
    def rest(self) -> int:
        return self.arrival.num_tokens - self.cached - self.computed

    @property
    def keys(self) -> int:
        """Tokens before each token of the rest, summed."""
        before = self.cached + self.computed
        return self.rest * (before + self.arrival.num_tokens) // 2


@dataclass(slots=True, eq=False)
class SimNode:
    """One node. A prefill node computes one prompt after the other; the others in pieces beside their streams: a decode
    node in small ones, a mixed node in those that a step without streams has.
    """

    events: EventQueue
    cache: LruBlocks
    is_prefill: bool
    is_mixed: bool = False
    num_slots: int = 256
    shortest_first: bool = True
    changed: Callable[[], None] = lambda: None
    news: dict[int, StoredBlock | None] = field(default_factory=dict)  # blocks not told yet; None: evicted
    queue: deque[Prompt] = field(default_factory=deque)
    current: Prompt | None = None
    num_running: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    work_s: float = 0.0
    _begun_s: float = 0.0
    _current_s: float = 0.0
    _context: int = 0  # tokens of the running sequences
    _step: int = 0
    _step_ends_s: list[float] = field(default_factory=list)
    _ends: dict[int, list[tuple[SimRequest, Ended, int]]] = field(default_factory=lambda: defaultdict(list))
    _waiting: deque[tuple[SimRequest, Ended]] = field(default_factory=deque)
    _is_stepping: bool = False

    # --- what comes

    def add_prompt(self, prompt: Prompt) -> None:
        prompt.cached = self._match(prompt)
        self.queue.append(prompt)
        if self.is_prefill:
            if self.current is None:
                self._begin()
        else:
            self._step_on()
        self.changed()

    def add_sequence(self, arrival: SimRequest, ended: Ended) -> None:
        """A sequence that was handed over, with its first token."""
        self._publish(arrival.blocks)
        self._waiting.append((arrival, ended))
        self._step_on()
        self.changed()

    # --- prefill nodes

    def _match(self, prompt: Prompt) -> int:
        return min(self.cache.match(prompt.arrival.blocks), prompt.arrival.num_tokens - 1)

    def _next(self) -> Prompt:
        if not self.shortest_first or len(self.queue) == 1:
            return self.queue.popleft()
        now_s = self.events.now_s
        best = min(self.queue, key=lambda one: self._rest_s(one) - AGEING * (now_s - one.came_s))
        self.queue.remove(best)
        return best

    def _rest_s(self, prompt: Prompt) -> float:
        return TOKEN_S * prompt.rest + KEY_S * prompt.keys

    def _begin(self) -> None:
        self.current = prompt = self._next()
        prompt.cached = self._match(prompt)
        self._note(prompt)
        self._begun_s = self.events.now_s
        self._current_s = prefill_s(prompt.arrival.num_tokens, prompt.cached)
        self.work_s += self._current_s
        self.events.after(self._current_s, self._computed)

    def _computed(self) -> None:
        prompt = self.current
        assert prompt is not None
        self._publish(prompt.arrival.blocks)
        self.current = None
        if self.queue:
            self._begin()
        prompt.done()
        self.changed()

    def _note(self, prompt: Prompt) -> None:
        self.hit_tokens += prompt.cached
        self.computed_tokens += prompt.rest

    def _publish(self, blocks: tuple[int, ...]) -> None:
        stored, evicted = self.cache.put(blocks)
        self.news |= {block.block: block for block in stored}
        self.news |= dict.fromkeys(evicted)

    # --- decode nodes

    def _step_on(self) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            self._begin_step()

    def _begin_step(self) -> None:
        while self._waiting and self.num_running < self.num_slots:
            arrival, ended = self._waiting.popleft()
            self._run(arrival, ended)
        pieces = self._pieces()
        self._step += 1
        step_s = self.step_s
        token_s, key_s, once_s = (TOKEN_S, KEY_S, 0.0) if self.is_mixed else (BESIDE_S, BESIDE_KEY_S, PROMPTS_S)
        if pieces:
            step_s += once_s
            for prompt, count in pieces:
                step_s += count * (token_s + key_s * (prompt.cached + prompt.computed + count / 2))
        self.events.after(step_s, lambda: self._end_step(pieces))

    @property
    def step_s(self) -> float:
        return STEP_S + DECODE_S * self.num_running + CONTEXT_S * self._context

    @property
    def step_tokens(self) -> int:
        """Prompt tokens of a step."""
        if self.is_mixed or not self.num_running:
            return WHOLE_TOKENS
        return max(LEAST_TOKENS, STEP_TOKENS - self.num_running)

    def _pieces(self) -> list[tuple[Prompt, int]]:
        """As the product's planner: the further a prompt is, the less of it a step takes beside decodes."""
        share, pieces = PrefillBudget.whole(self.step_tokens), []
        if self.num_running and not self.is_mixed:
            share = PrefillBudget.beside(self.num_running, WHOLE_TOKENS, self.step_tokens, STEP_KEYS)
        for prompt in self.queue:
            if not prompt.computed:
                prompt.cached = self._match(prompt)
            start = prompt.cached + prompt.computed
            if not share.admits(start):
                break
            pieces.append((prompt, share.take(start, prompt.rest)))
        return pieces

    def _end_step(self, pieces: list[tuple[Prompt, int]]) -> None:
        self._context += self.num_running
        self._step_ends_s.append(self.events.now_s)
        for prompt, count in pieces:
            if not prompt.computed:
                self.hit_tokens += prompt.cached
            prompt.computed += count
            self.computed_tokens += count
            if not prompt.rest:
                self.queue.remove(prompt)
                self._publish(prompt.arrival.blocks)
                prompt.done()
                assert prompt.ended is not None
                self._run(prompt.arrival, prompt.ended)
        ends = self._ends.pop(self._step, ())
        for arrival, ended, begun in ends:
            self.num_running -= 1
            self._context -= arrival.num_tokens + max(2, arrival.num_output)
            if arrival.answered:
                self._publish(arrival.answered)
            ended(self._step_ends_s[begun : begun + arrival.num_output - 1])
        if pieces or ends:
            self.changed()
        if self.num_running or self.queue or self._waiting:
            self._begin_step()
        else:
            self._is_stepping = False

    def _run(self, arrival: SimRequest, ended: Ended) -> None:
        self.num_running += 1
        self._context += arrival.num_tokens + 1
        self._ends[self._step + max(1, arrival.num_output - 1)].append((arrival, ended, self._step))

    # --- what it tells

    @property
    def has_prompts(self) -> bool:
        return bool(self.queue) or self.current is not None

    @property
    def load(self) -> NodeLoad:
        tokens = sum(one.rest for one in self.queue)
        keys = sum(one.keys for one in self.queue)
        if self.current is not None:
            left = 1.0 - min(1.0, (self.events.now_s - self._begun_s) / self._current_s)
            tokens += round(self.current.rest * left)
            keys += round(self.current.keys * left)
        measured = (self.step_s + PROMPTS_S, BESIDE_S, BESIDE_KEY_S)
        if self.is_prefill or self.is_mixed:
            measured = (self.step_s if self.is_mixed else 0.0, TOKEN_S, KEY_S)
        return NodeLoad(
            tokens, self.num_running, len(self._waiting), self.num_slots, 0, 0, 0, *measured, keys,
            0 if self.is_prefill else self.step_tokens, step_keys=0 if self.is_mixed else STEP_KEYS,
            num_context=self._context, context_s=CONTEXT_S,
        )  # fmt: skip
