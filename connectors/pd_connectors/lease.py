"""P's side of the handoff: which blocks a reader may read, and until when.

One lease, as a table (every other call leaves it as it is):

    state    call                    becomes   effect
    open     announce(nothing)       open      P computes and has all its blocks, D may reserve its own; version + 1
    open     announce(partial)       open      readable grows; version + 1
    open     announce(whole prompt)  ready     the same; with first tokens `finish` too, in one change
    open     finish(first tokens)    open      the tokens become visible; the clock of a held lease starts
    ready    finish(first tokens)    ready     the same
    any live retract()               open      generation + 1, nothing readable; version + 1
    any live renew()                 same      expires_at = now + ttl (a held lease that is not finished has no clock)
    any live abandon()               same      its last reader left: expires_at = now + ABANDON_GRACE_S at the latest
    any live release()               ended     LeaseEnded is queued for `take_ended`
    any live expire(), time over     ended     the same
    any live end()                   ended     nothing is queued: P itself wanted it
    ended    renew(), confirm()      ended     "ended" and "not ok", from a bounded list of tombstones

The fence: every change happens under one lock *before* the engine may reuse a block, and `confirm` answers under the
same lock. So `ok` means that at this moment the blocks still held the lease's KV, hence also at every earlier moment of
the same generation, in particular while D was reading.

A lease expires in `expire` only. So a control thread that runs late first reads the renewals that arrived in time, and
until then the lease's blocks are not given back.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_connectors.base import LeaseEnded, PublishSpec
from pd_connectors.protocol.errors import LeaseEnd
from pd_connectors.protocol.messages import (
    NO_PREFILL,
    Confirm,
    ConfirmReply,
    LeaseRef,
    LeaseState,
    PrefillFacts,
    SampledToken,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_connectors.protocol.layout import BlockLayout, BlockRun

MAX_TOMBSTONES = 4096
ABANDON_GRACE_S = 2.0  # time for the router to send another D, before P stops computing the prompt


@dataclass(slots=True)
class _Lease:
    ref: LeaseRef
    num_tokens: int  # the whole prompt
    expires_at: float | None  # clock; None: held and not finished
    generation: int = 0
    version: int = 1
    num_readable: int = 0
    runs: tuple[BlockRun, ...] = ()  # by group; () while nothing is readable
    first_tokens: tuple[SampledToken, ...] = ()
    is_begun: bool = False
    announced_at: float = 0.0
    prefill: PrefillFacts = NO_PREFILL


class LeaseTable:
    """The leases of one engine. Every method may be called from any thread and returns at once.

    clock: monotonic seconds. ttl_s: life of a lease after its last renewal. wall_clock: Unix time, for measuring.
    """

    def __init__(
        self,
        engine_id: str,
        epoch: int,
        layout: BlockLayout,
        ttl_s: float,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine_id = engine_id
        self._epoch = epoch
        self._layout = layout
        self._ttl_s = ttl_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._tombstones: dict[str, LeaseState] = {}  # oldest first
        self._ended: list[LeaseEnded] = []
        self._changed: dict[str, None] = {}  # an ordered set

    # the step loop's side

    def open(self, num_tokens: int, *, hold: bool) -> LeaseRef:
        """A new lease on a prompt of `num_tokens`, nothing readable yet."""
        ref = LeaseRef(self._engine_id, self._epoch, secrets.token_hex(12))
        with self._lock:
            expires_at = None if hold else self._clock() + self._ttl_s
            self._leases[ref.lease_id] = _Lease(ref, num_tokens, expires_at)
        return ref

    def announce(self, publish: PublishSpec) -> None:
        """Make `publish` readable and its first tokens known: one change, so a reader learns both from one message.

        Void when the lease has ended. The blocks are void, but not the tokens, when the lease was retracted after the
        step was planned.
        """
        with self._lock:
            lease = self._leases.get(publish.lease_id)
            is_current = lease is not None and lease.generation == publish.generation
            if lease is None or not (is_current or publish.first_tokens):
                return
            if is_current:
                self._expose(lease, publish)
            if publish.first_tokens:
                self._finish(lease, publish.first_tokens, publish.prefill)
            self._touch(lease)

    def finish(self, lease_id: str, first_tokens: tuple[SampledToken, ...], prefill: PrefillFacts = NO_PREFILL) -> None:
        """Make the first tokens known, which took `prefill`. Ignored when the lease has ended meanwhile."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is not None:
                self._finish(lease, first_tokens, prefill)
                self._touch(lease)

    def retract(self, lease_id: str) -> int | None:
        """Void all announcements. Returns the new generation, or None when the lease has ended."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                return None
            lease.generation += 1
            lease.num_readable = 0
            lease.is_begun = False
            lease.runs = ()
            self._touch(lease)
            return lease.generation

    def end(self, lease_id: str, reason: LeaseEnd) -> None:
        """End a lease for the engine. `take_ended` does not report it."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is not None:
                self._bury(lease, reason)
            self._ended = [event for event in self._ended if event.lease_id != lease_id]

    def end_all(self, reason: LeaseEnd) -> None:
        """End all leases, at shutdown."""
        with self._lock:
            for lease in list(self._leases.values()):
                self._bury(lease, reason)

    def take_ended(self) -> list[LeaseEnded]:
        """Returns the leases that readers or the clock ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    # the control thread's side

    def renew(self, ref: LeaseRef) -> LeaseState:
        """Prolong the lease. Returns its state. Unknown leases count as EXPIRED."""
        with self._lock:
            lease = self._live(ref)
            if lease is None:
                return self._tombstone(ref)
            if lease.expires_at is not None:
                lease.expires_at = self._clock() + self._ttl_s
            return self._snapshot(lease)

    def confirm(self, asked: Confirm) -> ConfirmReply:
        """The fence: see the module's docstring."""
        with self._lock:
            lease = self._live(asked.lease)
            ok = (
                lease is not None
                and lease.generation == asked.generation
                and 0 < asked.num_tokens <= lease.num_readable
            )
            return ConfirmReply(asked.lease, asked.generation, asked.num_tokens, asked.nonce, ok)

    def abandon(self, ref: LeaseRef) -> None:
        """Note that the last reader has left before it had the whole prompt."""
        with self._lock:
            lease = self._live(ref)
            if lease is not None:
                lease.expires_at = min(
                    math.inf if lease.expires_at is None else lease.expires_at, self._clock() + ABANDON_GRACE_S
                )

    def release(self, ref: LeaseRef) -> None:
        """End the lease: no reader needs it any more."""
        with self._lock:
            lease = self._live(ref)
            if lease is not None:
                self._bury(lease, LeaseEnd.RELEASED)
                self._ended.append(LeaseEnded(ref.lease_id, LeaseEnd.RELEASED))

    def expire(self) -> float:
        """End the leases that no reader renewed in time. Returns when the next one runs out (clock; inf: none will)."""
        with self._lock:
            now = self._clock()
            for lease in list(self._leases.values()):
                if lease.expires_at is not None and lease.expires_at <= now:
                    self._bury(lease, LeaseEnd.EXPIRED)
                    self._ended.append(LeaseEnded(lease.ref.lease_id, LeaseEnd.EXPIRED))
            return min((at for x in self._leases.values() if (at := x.expires_at) is not None), default=math.inf)

    def take_changed(self) -> list[LeaseState]:
        """Returns snapshots of the leases that changed since the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
            states = []
            for lease_id in changed:
                lease = self._leases.get(lease_id)
                state = self._snapshot(lease) if lease is not None else self._tombstones.get(lease_id)
                if state is not None:
                    states.append(state)
            return states

    def __len__(self) -> int:
        """The number of live leases."""
        return len(self._leases)

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` would return something."""
        return bool(self._ended)

    # with the lock held

    def _expose(self, lease: _Lease, publish: PublishSpec) -> None:
        num_tokens = publish.num_tokens
        assert lease.num_readable <= num_tokens <= lease.num_tokens, (lease, publish)
        assert num_tokens == lease.num_tokens or num_tokens % self._layout.block_size == 0, publish
        groups = self._layout.groups if num_tokens else ()
        readable = [group.handed_over(lease.num_tokens, num_tokens) for group in groups]
        assert not num_tokens or len(publish.runs) >= len(self._layout.required), publish
        assert [run.span for run in publish.runs] == readable[: len(publish.runs)], publish
        for known, run in zip(lease.runs, publish.runs, strict=bool(lease.runs)):
            assert run.block_ids[: len(known.block_ids)] == known.block_ids, "announced blocks are pinned"
        lease.num_readable = num_tokens
        lease.runs = publish.runs
        lease.is_begun = True
        lease.announced_at = self._wall_clock()

    def _finish(self, lease: _Lease, first_tokens: tuple[SampledToken, ...], prefill: PrefillFacts) -> None:
        lease.first_tokens = first_tokens
        lease.prefill = prefill
        if lease.expires_at is None:
            lease.expires_at = self._clock() + self._ttl_s

    def _live(self, ref: LeaseRef) -> _Lease | None:
        """The lease, unless it has ended or is another epoch's."""
        lease = self._leases.get(ref.lease_id)
        return lease if lease is not None and lease.ref == ref else None

    def _bury(self, lease: _Lease, reason: LeaseEnd) -> None:
        lease_id = lease.ref.lease_id
        del self._leases[lease_id]
        self._tombstones[lease_id] = LeaseState(lease.ref, lease.generation, lease.version + 1, 0, (), ended=reason)
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        self._changed[lease_id] = None

    def _tombstone(self, ref: LeaseRef) -> LeaseState:
        known = self._tombstones.get(ref.lease_id)
        if known is not None and known.lease == ref:
            return known
        return LeaseState(ref, 0, 0, 0, (), ended=LeaseEnd.EXPIRED)

    def _touch(self, lease: _Lease) -> None:
        lease.version += 1
        self._changed[lease.ref.lease_id] = None

    def _snapshot(self, lease: _Lease) -> LeaseState:
        return LeaseState(
            lease=lease.ref,
            generation=lease.generation,
            version=lease.version,
            num_tokens_readable=lease.num_readable,
            runs=lease.runs,
            first_tokens=lease.first_tokens,
            ttl_s=self._ttl_s if lease.expires_at is not None else 0.0,
            is_begun=lease.is_begun,
            announced_at=lease.announced_at,
            prefill=lease.prefill,
        )
