"""Changes and questions between the workers of a router: one order for all, whatever dies in between."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from pd_router.process import worker_messages as messages
from pd_router.process.worker_hub import ANSWER_S, COMMIT_S, SILENCE_S, START_S, WorkerHub
from pd_router.process.worker_supervisor import LOOK_S, WorkerSupervisor
from pd_router.sources.node_change import NodeChange, RestartState

if TYPE_CHECKING:
    from pd_router.admission.key_limits import KeyUsage

NUM_WORKERS = 3


@dataclass
class SimulatedWorker:
    """What a process holds. Its wires lose nothing while it lives."""

    to_worker: deque[messages.ToWorker] = field(default_factory=deque)
    to_hub: deque[messages.ToSupervisor] = field(default_factory=deque)
    state: RestartState | None = None
    serves: bool = False
    committed: list[messages.Committed] = field(default_factory=list)
    answers: list[messages.AllTold] = field(default_factory=list)
    used: list[messages.UsedBy] = field(default_factory=list)

    def read(self) -> None:
        match self.to_worker.popleft():
            case messages.State(version, restart_state):
                self.state = restart_state
                self.to_hub.append(messages.Applied(version))
            case messages.Go():
                self.serves = True
            case messages.Committed() as committed:
                self.committed.append(committed)
            case messages.Asked(worker, number, topic):
                self.to_hub.append(messages.Reported(worker, number, topic))
            case messages.AllTold() as answers:
                self.answers.append(answers)
            case messages.UsedBy() as used:
                self.used.append(used)


class World:
    def __init__(self, restart_state: RestartState | None = None) -> None:
        self.now_s = 0.0
        self.hub = WorkerHub(restart_state or RestartState(), lambda: self.now_s)
        self.workers: dict[int, SimulatedWorker] = {}
        self.numbers = iter(range(1 << 30))

    def start(self, at: int) -> SimulatedWorker:
        worker = self.workers[at] = SimulatedWorker()
        self.hub.join(at, worker.to_worker.append)
        worker.to_hub.append(messages.Ready())  # it waits for its state first; the hub must not rely on that
        return worker

    def kill(self, at: int) -> None:
        if self.workers.pop(at, None) is not None:
            self.hub.leave(at)

    def commit(self, at: int, change: NodeChange) -> int:
        number = next(self.numbers)
        self.workers[at].to_hub.append(messages.Commit(number, change))
        return number

    def receive(self, at: int) -> None:
        self.hub.take(at, self.workers[at].to_hub.popleft())

    def settle(self) -> None:
        while any(worker.to_worker or worker.to_hub for worker in self.workers.values()):
            for at, worker in self.workers.items():
                while worker.to_worker:
                    worker.read()
                while worker.to_hub:
                    self.receive(at)


def random_change(draw: random.Random) -> NodeChange:
    kind = draw.choice(("add", "remove", "drain", "resume"))
    return NodeChange(kind, f"http://{draw.randrange(4)}", "decode", draw.randrange(3))  # type: ignore[arg-type]


@pytest.mark.long_cases
@pytest.mark.parametrize("seed", range(30))
def test_what_is_committed_is_in_every_worker_that_serves(seed: int) -> None:
    """Orders at all workers at once; workers that die, join and read late."""
    draw = random.Random(seed)
    world = World()
    sent: dict[tuple[int, int], NodeChange] = {}
    num_committed = 0
    for at in range(NUM_WORKERS):
        world.start(at)
    for _ in range(600):
        at = draw.randrange(NUM_WORKERS)
        worker = world.workers.get(at)
        event = draw.choices(("read", "hear", "commit", "kill"), (45, 45, 8, 2))[0]
        if worker is None:
            world.start(at)
        elif event == "read" and worker.to_worker:
            before = len(worker.committed)
            worker.read()
            if len(worker.committed) > before:
                num_committed += 1
                change = sent[at, worker.committed[-1].id]
                assert not any(lacks(other, change) for other in world.workers.values())
        elif event == "hear" and worker.to_hub:
            world.receive(at)
        elif event == "commit" and worker.serves:
            change = NodeChange("add", f"http://{len(sent)}", "decode")  # so that each one can be told apart
            sent[at, world.commit(at, change)] = change
        elif event == "kill":
            world.kill(at)
    world.settle()
    assert num_committed > 10
    assert all(worker.state == world.hub.restart_state for worker in world.workers.values())


def lacks(worker: SimulatedWorker, change: NodeChange) -> bool:
    """Whether a worker serves without a committed change."""
    return worker.serves and change.url not in dict((worker.state or RestartState()).posted)


@pytest.mark.parametrize("seed", range(10))
def test_all_workers_end_with_one_state_whatever_was_ordered(seed: int) -> None:
    draw = random.Random(seed)
    world = World()
    for at in range(NUM_WORKERS):
        world.start(at)
    for _ in range(200):
        world.commit(draw.randrange(NUM_WORKERS), random_change(draw))
        at = draw.randrange(NUM_WORKERS)
        if draw.random() < 0.5:
            world.settle()
        elif world.workers[at].to_hub:
            world.receive(at)
    world.settle()
    assert {str(worker.state) for worker in world.workers.values()} == {str(world.hub.restart_state)}


def two_that_serve() -> tuple[World, SimulatedWorker, SimulatedWorker]:
    world = World()
    one, other = world.start(0), world.start(1)
    world.settle()
    assert (one.serves, other.serves) == (True, True)
    return world, one, other


def test_an_order_waits_for_a_frozen_worker_until_that_is_replaced() -> None:
    world, one, other = two_that_serve()
    world.commit(0, NodeChange("drain", "http://n", epoch=7))
    world.receive(0)
    one.read()
    world.receive(0)
    assert not one.to_worker, "the other has not read it"
    assert world.hub.late() == set()
    world.now_s += COMMIT_S
    world.hub.take(0, messages.Alive())
    world.hub.take(1, messages.Alive())
    assert world.hub.late() == {1}, "its loop runs, and does not obey"
    world.kill(1)
    one.read()
    assert one.committed
    assert (late := world.start(1)) is not other
    world.settle()
    assert late.state == RestartState((), {"http://n": 7})


def test_a_silent_worker_is_frozen_and_one_that_speaks_is_not() -> None:
    world, _, _ = two_that_serve()
    for _ in range(10):
        world.now_s += SILENCE_S - 0.5
        assert world.hub.late() == set()
        for at in (0, 1):
            world.hub.take(at, messages.Alive())
    world.now_s += SILENCE_S - 0.5
    world.hub.take(0, messages.Alive())
    world.now_s += 0.5
    assert world.hub.late() == {1}
    world.kill(1)
    assert world.hub.late() == set(), "once"
    world.hub.take(1, messages.Alive())  # of the pipe of the one that was killed
    world.hub.join(1, SimulatedWorker().to_worker.append)
    world.now_s += START_S - 0.5
    world.hub.take(0, messages.Alive())
    assert world.hub.late() == set(), "it takes its time to start"
    world.now_s += 0.5
    assert world.hub.late() == {1}


def test_a_supervisor_that_did_not_run_takes_no_worker_for_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stop it cannot tell the silence of the workers from its own, whether it reads their messages first."""
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    own = SimpleNamespace(restart_state=RestartState())
    supervisor = WorkerSupervisor(2, None, own, 1.0, scheme="http", is_supervised=True)  # type: ignore[arg-type]
    hub = supervisor._hub
    for at in (0, 1):
        hub.join(at, SimulatedWorker().to_worker.append)
        hub.take(at, messages.Ready())
    for stopped_s in (1.0, 1000.0, 10.0):
        now_s += stopped_s
        hub.take(1, messages.Alive())  # worker 0 did not run either
        assert hub.late() == set()
        now_s += 0.4
        hub.take(0, messages.Alive())
        assert hub.late() == set()
    looks = 0
    while not hub.late():
        now_s += LOOK_S
        hub.take(1, messages.Alive())
        looks += 1
    assert hub.late() == {0}
    assert looks == SILENCE_S / LOOK_S, "and one that is silent then is found as soon as ever"


def test_a_worker_that_starts_delays_no_order_and_misses_none() -> None:
    world, one, _ = two_that_serve()
    starting = world.start(2)
    starting.to_hub.clear()  # it polls the nodes
    world.commit(0, NodeChange("add", "http://n", "decode"))
    for at in (0, 1):
        if world.workers[at].to_hub:
            world.receive(at)
    for at in (0, 1):
        world.workers[at].read()
        world.receive(at)
    one.read()
    assert one.committed, "it does not serve yet"
    starting.to_hub.append(messages.Ready())
    world.receive(2)
    while not starting.serves:
        starting.read()
    assert starting.state == world.hub.restart_state, "all of it before it may serve"


def test_a_question_is_answered_without_those_that_are_late_or_gone() -> None:
    world, one, _ = two_that_serve()
    world.start(2)
    world.settle()
    one.to_hub.append(messages.Ask(1, "nodes"))
    world.receive(0)
    world.workers[2].read()
    world.receive(2)
    assert not one.to_worker
    world.now_s += ANSWER_S
    assert world.hub.late() == set(), "a question replaces no worker"
    one.read()
    assert one.answers == [messages.AllTold(1, {1: None, 2: "nodes"})]
    one.to_hub.append(messages.Ask(2, "nodes"))
    world.receive(0)
    world.kill(1)
    world.workers[2].read()
    world.receive(2)
    one.read()
    assert one.answers[1] == messages.AllTold(2, {2: "nodes"})


def test_an_order_that_a_successor_would_miss_is_refused() -> None:
    world, one, _ = two_that_serve()
    world.hub.is_handed_over = True
    world.commit(0, NodeChange("add", "http://n", "decode"))
    world.settle()
    assert one.committed[-1].is_refused
    assert world.hub.restart_state == RestartState()


@pytest.mark.parametrize(
    ("change", "after"),
    [
        (NodeChange("add", "b", "mixed"), RestartState((("a", "decode"), ("b", "mixed")), {"a": 1})),
        (NodeChange("remove", "a"), RestartState()),
        (NodeChange("remove", "b"), RestartState((("a", "decode"),), {"a": 1})),
        (NodeChange("drain", "b", epoch=2), RestartState((("a", "decode"),), {"a": 1, "b": 2})),
        (NodeChange("resume", "a"), RestartState((("a", "decode"),), {})),
    ],
)
def test_a_change_is_made_to_a_copy(change: NodeChange, after: RestartState) -> None:
    before = RestartState((("a", "decode"),), {"a": 1})
    assert before.changed(change) == after
    assert before.changed(change).changed(change) == after, "an order may be repeated"
    assert before == RestartState((("a", "decode"),), {"a": 1})


def test_what_keys_have_used_reaches_the_others_and_so_does_a_worker_that_ends() -> None:
    hub = WorkerHub(RestartState(), lambda: 0.0)
    told: list[list[messages.ToWorker]] = [[], [], []]
    for number in range(3):
        hub.join(number, told[number].append)
    usage: KeyUsage = {"one": (1, 5.0, 2)}
    hub.take(0, messages.Used(usage))
    hub.leave(1)  # it has told nothing
    hub.leave(0)
    used = [[message for message in some if isinstance(message, messages.UsedBy)] for some in told]
    assert used == [[], [messages.UsedBy(0, usage)], [messages.UsedBy(0, usage), messages.UsedBy(0, None)]]
