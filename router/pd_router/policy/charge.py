"""Work that a router books on a node, from its choice until the node's part of the request is over."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pd_router.nodes.ledger import NO_WORK, USUAL_CONTEXT, NodeWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_router.nodes.node import Node
    from pd_router.policy.route import Route


class Charge:
    """Work booked on a node when it is chosen, so that a burst spreads over nodes. Released exactly once."""

    __slots__ = (
        "_begun_s", "_clock", "_entry", "_found_idle", "_is_hidden", "_node", "_num_bytes", "_prefill_bytes",
        "_sequences", "_timer",
    )  # fmt: skip

    def __init__(
        self,
        node: Node,
        clock: Callable[[], float],
        *,
        prefill_bytes: int = 0,
        prompt_tokens: int | None = None,
        cached_tokens: int = 0,
        sequences: int = 0,
        context: int = USUAL_CONTEXT,
    ) -> None:
        """`prefill_bytes`: of the prompt that the node computes. `prompt_tokens`: of those that it has not cached.

        `prompt_tokens` None: estimated from the bytes. `cached_tokens`: of the prompt, before those. `context`: tokens
        of the whole prompt, which each of `sequences` begins with.
        """
        node.prefill_bytes += prefill_bytes
        node.decode_sequences += sequences
        view, ledger = node.view, node.view.ledger
        tokens = round(prefill_bytes * view.ratio.value) if prompt_tokens is None else prompt_tokens
        self._found_idle = prefill_bytes > 0 and not sequences and not view.queued_tokens
        if self._found_idle and view.trial.num_waited:
            view.trial.begin()
        self._entry = ledger.open(NodeWork(tokens, cached_tokens, sequences, sequences * context))
        self._node = node
        self._clock = clock
        self._begun_s = clock()
        self._num_bytes = self._prefill_bytes = prefill_bytes
        self._sequences = sequences
        self._is_hidden = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def number(self) -> int:
        """The number by which the node's feed says that the node's load includes this charge."""
        return self._entry.number

    @property
    def name(self) -> str:
        """The value of the leg's header CHARGE_HEADER."""
        return f"{self._node.view.ledger.router}.{self._entry.number}"

    def count_prompt(self, num_tokens: int) -> None:
        """Note the prompt's exact length, which a ticket or the head of a stream tells."""
        self._node.view.ratio.note(num_tokens, self._num_bytes)
        work, most = self._entry.work, self._node.max_model_len
        if work.tokens or work.sequences:  # a handoff's sequences read nothing here
            rest = max(0, num_tokens - work.cached_tokens) if work.tokens else 0
            context = num_tokens if most is None else min(num_tokens, most)
            counted = NodeWork(rest, work.cached_tokens, work.sequences, work.sequences * context)
            self._node.view.ledger.change(self._entry, counted)

    def hide_prefill(self, expected_s: float | None) -> None:
        """Assume that the prefill ends `expected_s` from now, because the answer will not show when.

        None: no estimate, so the charge stays until `prefill_over`.
        """
        self._is_hidden = True
        if expected_s is not None:
            self._timer = asyncio.get_running_loop().call_later(expected_s, self.prefill_over)

    def prefill_done(self) -> None:
        """Note that the node has just prefilled the prompt, and its speed. Ignored after `hide_prefill`."""
        if self._is_hidden:
            return
        if self._prefill_bytes:
            self._node.speed.note(self._prefill_bytes, self._begun_s, now_s := self._clock())
            if self._found_idle:
                view, work = self._node.view, self._entry.work
                reported = view.ledger.reported
                view.trial.note(now_s - self._begun_s, reported.reading_s(work.tokens, work.keys))
        self.prefill_over()

    def prefill_over(self) -> None:
        """Note that the prefill has ended, or is assumed to have ended."""
        self._node.prefill_bytes -= self._prefill_bytes
        self._prefill_bytes = 0
        if (work := self._entry.work).tokens:
            rest = NodeWork(sequences=work.sequences, context=work.context) if self._sequences else NO_WORK
            self._node.view.ledger.change(self._entry, rest)
        if self._timer is not None:
            self._timer.cancel()

    def release(self) -> None:
        if self._prefill_bytes or self._entry.work.tokens:
            self.prefill_over()
        self._node.decode_sequences -= self._sequences
        self._sequences = 0
        self._node.view.ledger.close(self._entry)

    def __enter__(self) -> Charge:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def charge_for(
    route: Route, node: Node, clock: Callable[[], float], *, reads: bool, generates: bool, shows_reading: bool = True
) -> Charge:
    """The charge of one leg. `reads`, `generates`: what the node does for the request.

    `shows_reading`: the leg shows when the prompt has been read; otherwise that is assumed.
    """
    prompt, work = route.prompt, route.prompt.work(node) if reads else NO_WORK
    charge = Charge(
        node, clock, prefill_bytes=prompt.num_bytes if reads else 0, prompt_tokens=work.tokens,
        cached_tokens=work.cached_tokens, sequences=prompt.num_sequences if generates else 0,
        context=int(prompt.context_at(node)) if generates else 0,
    )  # fmt: skip
    if reads and not shows_reading:
        charge.hide_prefill(route.queue_s(node))
    return charge
