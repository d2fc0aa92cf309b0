"""What the supervisor of a router's workers knows: one order of all changes, and questions between workers. No IO."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pd_router.process import worker_messages as messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_router.sources.node_change import RestartState

    Send = Callable[[messages.ToWorker], None]
COMMIT_S = 5.0  # for a worker to apply a change; it is then taken to be frozen, and is replaced
SILENCE_S = 5.0  # without a message, as above. The longest that a worker's loop was seen busy is 1.5 s
START_S = 60.0  # for the first message
ANSWER_S = 2.0  # for a worker to answer another's question


@dataclass(slots=True, eq=False)
class _Member:
    send: Send
    silent_at_s: float  # when it is taken to be frozen, unless it says something before
    is_ready: bool = False
    is_serving: bool = False
    has_used: bool = False  # it has reported what API keys use


@dataclass(slots=True, eq=False)
class _Waiting:
    """A change or a question that waits for other workers."""

    worker: int
    id: int
    late_at_s: float
    version: int = 0  # of a change; 0: a question
    missing: set[int] = field(default_factory=set)
    answers: dict[int, Any] = field(default_factory=dict)


class WorkerHub:
    """`clock`: monotonic seconds. Messages to one worker arrive in the order in which they were sent, or not at all.

    A change is committed when every worker that was ready at that moment has applied it or has left. A worker that
    joins gets all changes before it may go, so no worker ever serves without a committed change.
    """

    def __init__(self, restart_state: RestartState, clock: Callable[[], float]) -> None:
        self.restart_state = restart_state
        self.is_handed_over = False  # a successor has a copy of the state: changes are refused
        self._version = 1
        self._clock = clock
        self._members: dict[int, _Member] = {}
        self._waiting: list[_Waiting] = []

    @property
    def num_serving(self) -> int:
        return sum(member.is_serving for member in self._members.values())

    def join(self, worker: int, send: Send) -> None:
        """A worker process has started."""
        self._members[worker] = _Member(send, self._clock() + START_S)
        send(self._state())

    def leave(self, worker: int) -> None:
        """A worker process has ended. What it asked for is dropped; what waits for it goes on."""
        member = self._members.pop(worker, None)
        if member is not None and member.has_used:
            self._pass_on(messages.UsedBy(worker, None))
        self._waiting = [one for one in self._waiting if one.worker != worker]
        for one in list(self._waiting):
            one.missing.discard(worker)
            self._finish(one)

    def take(self, worker: int, message: messages.ToSupervisor) -> None:
        """A message of a worker that has joined. One that has left since, because it is killed, is ignored."""
        if (member := self._members.get(worker)) is None:
            return
        member.silent_at_s = self._clock() + SILENCE_S
        match message:
            case messages.Ready():
                member.is_ready = True
                member.send(messages.Go())
            case messages.Serving():
                member.is_serving = True
            case messages.Known(nodes):
                self.restart_state = replace(self.restart_state, known=nodes)
            case messages.Applied(version):
                for one in [one for one in self._waiting if 0 < one.version <= version]:
                    one.missing.discard(worker)
                    self._finish(one)
            case messages.Commit(number, change):
                if self.is_handed_over:
                    member.send(messages.Committed(number, is_refused=True))
                    return
                self.restart_state = self.restart_state.changed(change)
                self._version += 1
                for reached in self._members.values():
                    reached.send(self._state())
                self._wait(_Waiting(worker, number, self._clock() + COMMIT_S, self._version, self._ready()))
            case messages.Ask(number, topic):
                asked = self._ready() - {worker}
                for other in asked:
                    self._members[other].send(messages.Asked(worker, number, topic))
                self._wait(_Waiting(worker, number, self._clock() + ANSWER_S, missing=asked))
            case messages.Used(usage):
                member.has_used = True
                self._pass_on(messages.UsedBy(worker, usage))
            case messages.Reported(asker, number, answer):
                for one in [one for one in self._waiting if (one.worker, one.id) == (asker, number)]:
                    one.missing.discard(worker)
                    one.answers[worker] = answer
                    self._finish(one)

    def _pass_on(self, message: messages.UsedBy) -> None:
        for number, member in self._members.items():
            if number != message.worker:
                member.send(message)

    def late(self) -> set[int]:
        """Workers that are silent, or have not applied a change in time.

        Questions that are past their deadline get None for each of the rest.
        """
        frozen = {number for number, member in self._members.items() if self._clock() >= member.silent_at_s}
        for one in [one for one in self._waiting if self._clock() >= one.late_at_s]:
            if one.version:
                frozen |= one.missing
            else:
                one.answers |= dict.fromkeys(one.missing)
                one.missing.clear()
                self._finish(one)
        return frozen

    def _state(self) -> messages.State:
        return messages.State(self._version, self.restart_state)

    def _ready(self) -> set[int]:
        return {number for number, member in self._members.items() if member.is_ready}

    def _wait(self, one: _Waiting) -> None:
        self._waiting.append(one)
        self._finish(one)

    def _finish(self, one: _Waiting) -> None:
        if one.missing:
            return
        self._waiting.remove(one)
        self._members[one.worker].send(
            messages.Committed(one.id) if one.version else messages.AllTold(one.id, one.answers)
        )
