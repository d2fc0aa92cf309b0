"""Which adapters are in the slots of the device, and which sequences wait for theirs.

    known ──► in host memory ──► assigned a slot ──► ready: its sequences run
      ▲             │                  │
      └─ dropped ◄──┘◄──── replaced ◄──┘   the one that was used least recently, if none of its sequences runs

An adapter that got a slot keeps it until it is ready and a sequence of its had its turn; otherwise two adapters without
memory for their sequences could replace each other for ever.

No sequence waits for ever: when all slots are of running sequences, the first one in turn that lacks a slot closes one,
the one used least recently. No other request of that adapter enters after it in turn, so the slot is free when the
sequences that run in it have ended.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pd_cluster.scheduling.sequence import SequenceStatus
from pd_connectors.protocol.adapters import IN_HOST, ON_DEVICE, ON_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_cluster.scheduling.sequence import Request, Sequence


NO_SLOT = -1


class AdapterPlaces:
    """Adapters by digest. Without slots only sequences without an adapter are asked about."""

    def __init__(self, num_slots: int = 0) -> None:
        self._free = list(range(num_slots))
        self._slot_of: dict[str, int] = {}  # in the order of use, the last one at the end
        self._ready: set[str] = set()
        self._new: set[str] = set()  # with a slot in which no sequence had a turn
        self._running: set[str] = set()  # that sequences of this step use
        self._had_turn: set[str] = set()  # in this step, with a sequence that may have found no memory
        self._closed = ""  # no other request of it enters
        self._fill: tuple[tuple[int, str], ...] = ()  # for the next batch, at most one: a copy takes milliseconds
        self.in_host: dict[str, bool] = {}  # the known ones
        self.num_live: Counter[str] = Counter()  # requests
        self.wanted = ""  # the first one in turn that is not in host memory
        self.read_s = 0.0  # of files, lately; 0: not measured yet

    @property
    def tiers(self) -> dict[str, int]:
        """Where the nearest copy of each is."""
        return {
            digest: ON_DEVICE if digest in self._slot_of else IN_HOST if is_in_host else ON_FILE
            for digest, is_in_host in self.in_host.items()
        }

    @property
    def droppable(self) -> list[str]:
        """Those in host memory for which no request waits, the best first: without a slot, and not used for long."""
        held = [digest for digest, is_in_host in self.in_host.items() if is_in_host]
        idle = [digest for digest in held if digest not in self._slot_of and not self.num_live[digest]]
        return idle + [digest for digest in held if digest in self._slot_of]

    def forget(self, digest: str) -> None:
        """Remove an adapter that no request has. A step may still read its slot, and the next copy comes after it."""
        assert not self.num_live[digest]
        del self.in_host[digest], self.num_live[digest]
        self._leave(digest)

    def join(self, request: Request) -> None:
        self.num_live[request.message.adapter] += 1

    def leave(self, request: Request) -> None:
        self.num_live[request.message.adapter] -= 1

    # steps

    def begin(self, running: Iterable[Sequence]) -> None:
        """A step is planned, which these sequences may be in."""
        if self.in_host:
            self._running = {seq.request.message.adapter for seq in running}
            self._had_turn.clear()
        self._closed = self.wanted = ""

    def run(self, seq: Sequence) -> None:
        """A sequence runs from now on."""
        self._running.add(seq.request.message.adapter)

    def slot(self, seq: Sequence) -> int:
        """Of a sequence that runs."""
        digest = seq.request.message.adapter
        return self._slot_of[digest] if digest else NO_SLOT

    def admits(self, seq: Sequence) -> bool:
        """Whether a sequence may enter this step, or it waits for its adapter. Called in turn."""
        digest = seq.request.message.adapter
        if not digest:
            return True
        if digest in self._ready:
            if digest == self._closed and all(
                one.status is not SequenceStatus.RUNNING for one in seq.request.sequences
            ):
                return False
            self._slot_of[digest] = self._slot_of.pop(digest)
            self._new.discard(digest)
            self._had_turn.add(digest)
            return True
        if not self.in_host[digest]:
            self.wanted = self.wanted or digest
        elif digest not in self._slot_of and not self._fill and self._make_room(seq):
            self._slot_of[digest] = self._free.pop()
            self._new.add(digest)
            self._fill = ((self._slot_of[digest], digest),)
        return False

    def is_ready(self, seq: Sequence) -> bool:
        """Whether a sequence may run at once, of which others run, or ran in the step before."""
        return not (digest := seq.request.message.adapter) or digest in self._ready

    def take_fill(self) -> tuple[tuple[int, str], ...]:
        """What the batch copies beside its step."""
        fill, self._fill = self._fill, ()
        return fill

    def note_filled(self, filled: Iterable[tuple[int, str]]) -> None:
        """The step of a batch with these copies has retired."""
        self._ready |= {digest for slot, digest in filled if self._slot_of.get(digest) == slot}

    def _make_room(self, seq: Sequence) -> bool:
        """Free a slot if none is; else close one.

        A sequence that holds its blocks takes the slot of one that had its turn and waits for blocks: maybe for these.
        """
        if self._free:
            return True
        for digest in self._slot_of:
            is_new, had_turn = digest in self._new and self.num_live[digest], digest in self._had_turn
            if digest not in self._running and not is_new and (seq.table is not None or not had_turn):
                self._leave(digest)
                return True
        self._closed = self._closed or next((digest for digest in self._slot_of if digest in self._running), "")
        return False

    def _leave(self, digest: str) -> None:
        if digest in self._slot_of:
            self._free.append(self._slot_of.pop(digest))
            self._ready.discard(digest)
            self._new.discard(digest)
            if digest in self.in_host:
                self.in_host[digest] = self.in_host.pop(digest)  # now it is the last to be dropped
