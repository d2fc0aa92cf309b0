"""D's half over a fake transport: greetings, endpoints, and which loads fail when they break."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_connectors import link_speed
from pd_connectors.base import (
    CacheDescription,
    Event,
    FirstTokens,
    LoadDone,
    LoadDrained,
    LoadFailed,
    LoadReady,
    LoadSpec,
)
from pd_connectors.handshake import transport_checksum
from pd_connectors.p2p import LoadCounters
from pd_connectors.peer import PEER_IDLE_S
from pd_connectors.protocol.errors import LeaseEnd, LoadFailure
from pd_connectors.protocol.messages import (
    Confirm,
    ConfirmReply,
    Hello,
    HelloReply,
    LeaseRef,
    LeaseState,
    PrefillFacts,
    Release,
    Renew,
    SampledToken,
    ToOwner,
)
from pd_connectors.protocol.ticket import Ticket
from pd_connectors.pull_limits import DOUBT_S, LOST_GRACE_S, PullLimits
from pd_connectors.reader import HELLO_EVERY_S, Reader
from pd_connectors.transport import (
    Address,
    Completion,
    Connected,
    ConnectFailed,
    GroupIds,
    PeerKey,
    ReadEnded,
    ReadId,
    Transport,
)
from tests.connectors.layouts import full_layout, runs
from tests.connectors.simulation import CONTEXT, LAYOUT

if TYPE_CHECKING:
    from collections.abc import Callable

OWNER = ("owner", 1)


class FakeTransport(Transport):
    """Records the calls; the tests answer them."""

    def __init__(self) -> None:
        self.connects: list[PeerKey] = []
        self.reads: list[tuple[PeerKey, ReadId]] = []
        self.disconnects: list[PeerKey] = []

    def register(self, cache: CacheDescription) -> None: ...

    def describe(self) -> bytes:
        return b""

    def connect(self, peer: PeerKey, description: bytes) -> None:
        self.connects.append(peer)

    def read(self, peer: PeerKey, read_id: ReadId, remote: GroupIds, local: GroupIds) -> None:
        self.reads.append((peer, read_id))

    def disconnect(self, peer: PeerKey) -> None:
        self.disconnects.append(peer)

    def poll(self) -> list[Completion]:
        return []

    def set_waker(self, wake: Callable[[], None]) -> None: ...

    def close(self, deadline_s: float) -> None: ...


class Bench:
    """A reader with everything around it in plain lists."""

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.sent: list[ToOwner] = []
        self.events: list[Event] = []
        self.forgotten: list[Address] = []
        self.counters = LoadCounters(len(CONTEXT.layout.groups))
        self.reader = Reader(
            replace(CONTEXT, engine_id="D", epoch=1),
            PullLimits(),
            self.transport,
            lambda owner, message: self.sent.append(message),
            self.emit,
            self.forgotten.append,
            wall_clock=lambda: 1e9 + 4.0,
        )

    def emit(self, event: Event) -> None:
        self.counters.count(event)
        self.events.append(event)

    def begin(self, load_id: str, epoch: int = 1, lease_id: str = "", now: float = 0.0) -> Ticket:
        lease = LeaseRef("P", epoch, lease_id or f"lease-{load_id}")
        ticket = Ticket("r", lease, 0, 1e12, "f", LAYOUT, b"d", 32, 1, *OWNER)
        self.reader.begin(load_id, ticket, 30.0, now)
        return ticket

    def hello(self) -> Hello:
        return [message for message in self.sent if isinstance(message, Hello)][-1]

    def answer(self, epoch: int = 1, **changes: object) -> None:
        reply = HelloReply("P", epoch, "f", LAYOUT, b"there", transport_checksum(b"there"), self.hello().nonce)
        self.reader.on_message(OWNER, replace_struct(reply, changes), 0.0)

    def up(self) -> PeerKey:
        """The endpoint asked for last is connected."""
        key = self.transport.connects[-1]
        self.reader.on_completion(Connected(key), 0.0)
        return key

    def announce(self, ticket: Ticket, now: float = 0.0) -> None:
        state = LeaseState(ticket.lease, 0, 5, 32, runs(0, (1, 2)), (SampledToken(1),))
        self.reader.on_message(OWNER, state, now)

    def reading(self, load_id: str, epoch: int = 1, lease_id: str = "", now: float = 0.0) -> Ticket:
        """A load with a read in flight over an endpoint that is up."""
        ticket = self.begin(load_id, epoch, lease_id, now)
        if not self.transport.connects:
            self.answer(epoch)
            self.up()
        self.announce(ticket, now)
        self.reader.reserve(LoadSpec(load_id, runs(0, (8, 9)), 32), now)
        return ticket

    def finish(self, load_id: str, now: float = 0.0) -> None:
        """Its read ends well and P confirms."""
        self.reader.on_completion(ReadEnded((load_id, 0)), now)
        asked = [message for message in self.sent if isinstance(message, Confirm)][-1]
        reply = ConfirmReply(asked.lease, asked.generation, asked.num_tokens, asked.nonce, ok=True)
        self.reader.on_message(OWNER, reply, now)

    def finished(self, load_id: str) -> None:
        """A load that is over; the endpoint stays."""
        self.reading(load_id)
        self.finish(load_id)

    def releases(self) -> list[Release]:
        return [message for message in self.sent if isinstance(message, Release)]

    def outcome(self, load_id: str) -> list[object]:
        """Failure reasons, and the names of all other events."""
        mine = [event for event in self.events if getattr(event, "load_id", None) == load_id]
        return [event.reason if isinstance(event, LoadFailed) else type(event) for event in mine]


def replace_struct(reply: HelloReply, changes: dict[str, object]) -> HelloReply:
    return msgspec.structs.replace(reply, **changes)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_renewal_and_greeting_go_out_together(bench: Bench) -> None:
    ticket = bench.begin("a")
    assert Renew(ticket.lease) in bench.sent
    assert bench.hello().engine_id == "D"
    bench.reader.tick(1.0)
    assert len([message for message in bench.sent if isinstance(message, Hello)]) == 2


@pytest.mark.parametrize(("memory", "num_warnings"), [("cuda", 1), ("cpu", 0)])
def test_a_slow_link_between_gpus_is_told_once(
    bench: Bench, memory: str, num_warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_speed, "MIN_BYTES", 1)
    bench.reader.links.memory = memory
    for number, load_id in enumerate("ab"):
        bench.reading(load_id, now=float(number))
        assert len(bench.reader.links.speeds()) == number, "nothing is known before a read has ended"
        bench.finish(load_id, now=number + 0.5)
    assert bench.reader.links.speeds() == {f"{OWNER[0]}:{OWNER[1]}": 2 * LAYOUT.block_bytes / 0.5}
    warnings = [record.message for record in caplog.records if "Likely causes on one host" in record.message]
    assert len(warnings) == num_warnings


def test_a_link_that_became_slow_is_told_until_it_is_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over a new endpoint too: what the link gave before is known."""
    monkeypatch.setattr(link_speed, "MIN_BYTES", 1)
    name, num_slow = f"{OWNER[0]}:{OWNER[1]}", 0
    for number, seconds in enumerate([0.001, *[4.0] * 9, *[0.001] * 9]):
        load_id, now = str(number), 10.0 * number
        bench.reading(load_id, now=now)
        bench.finish(load_id, now + seconds)
        num_slow += bench.reader.links.are_slow() == {name: True}
    assert num_slow > 1
    assert bench.reader.links.are_slow() == {name: False}
    assert sum("the link is slow" in record.message for record in caplog.records) == 1


def test_loads_of_one_peer_share_greeting_and_endpoint(bench: Bench) -> None:
    first, second = bench.begin("a"), bench.begin("b")
    bench.answer()
    bench.up()
    bench.announce(first)
    bench.announce(second)
    assert len(bench.transport.connects) == 1
    assert bench.outcome("a") == bench.outcome("b") == [FirstTokens, LoadReady]


def test_the_first_token_does_not_wait_for_the_endpoint_but_for_the_greeting(bench: Bench) -> None:
    ticket = bench.begin("a")
    bench.announce(ticket)
    assert bench.events == []
    bench.answer()
    assert bench.outcome("a") == [FirstTokens]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"transport": b"thers"}, "damaged"),
        ({"fingerprint": "other"}, "FingerprintMismatch"),
        ({"layout": full_layout(32)}, "block_size"),
        ({"layout": full_layout(dtype="float16")}, "LayoutMismatch"),
        (
            {"layout": full_layout(dtype="float8_e4m3fn"), "fingerprint": "other"},
            "LayoutMismatch: the peer's KV is float8_e4m3fn, ours float32: start both nodes with the same dtype",
        ),
        ({"layout": msgspec.structs.replace(full_layout(), tp_size=0)}, "cannot be split over 0 ranks"),
        ({"layout": msgspec.structs.replace(full_layout(), tp_size=10**9)}, "cannot be split over 1000000000 ranks"),
    ],
)
def test_a_reply_that_does_not_match_is_refused(bench: Bench, changes: dict[str, Any], word: str) -> None:
    ticket = bench.begin("a")
    bench.announce(ticket)
    bench.answer(**changes)
    failed = bench.events[0]
    assert isinstance(failed, LoadFailed)
    assert failed.reason is LoadFailure.REJECTED
    assert word in failed.detail
    assert bench.outcome("a") == [LoadFailure.REJECTED, LoadDrained]
    assert bench.transport.connects == []


def test_a_peer_of_another_degree_is_read(bench: Bench) -> None:
    bench.begin("a")
    bench.answer(layout=msgspec.structs.replace(LAYOUT, tp_size=2))
    (key,) = bench.transport.connects
    assert (key.num_ranks, key.rank) == (2, 0)


def test_another_epoch_fails_the_old_loads_and_serves_the_new(bench: Bench) -> None:
    bench.reading("old", epoch=1)
    old_key = bench.transport.connects[0]
    bench.begin("new", epoch=2)
    bench.answer(epoch=2)
    assert bench.outcome("old")[-1] is LoadFailure.PEER_RESTARTED
    assert bench.transport.disconnects == [old_key]
    bench.reader.on_completion(ReadEnded(("old", 0), "torn down"), 0.0)
    assert bench.outcome("old")[-1] is LoadDrained
    assert bench.up().epoch == 2


def test_an_unasked_reply_is_only_a_reason_to_ask(bench: Bench) -> None:
    """It may be a delayed one of a dead predecessor: nothing is torn down on its word."""
    bench.reading("a")
    hellos = len(bench.sent)
    reply = HelloReply("P", 9, "f", LAYOUT, b"there", transport_checksum(b"there"), b"")
    bench.reader.on_message(OWNER, reply, 0.0)
    assert bench.transport.disconnects == []
    assert isinstance(bench.sent[hellos], Hello)
    bench.answer(epoch=1)
    assert LoadFailed not in [type(event) for event in bench.events]
    assert len(bench.transport.connects) == 1


def test_a_broken_endpoint_fails_its_loads_and_the_next_load_greets_again(bench: Bench) -> None:
    bench.reading("a")
    bench.reading("b")
    bench.reader.on_completion(ReadEnded(("a", 0), "gone", endpoint_broken=True), 0.0)
    assert bench.outcome("a")[-2:] == [LoadFailure.READ_FAILED, LoadDrained]
    assert bench.outcome("b")[-1] is LoadFailure.READ_FAILED, "drained only when its own read is terminal"
    bench.begin("c")
    bench.answer()
    assert len(bench.transport.connects) == 2


def test_a_failed_read_alone_leaves_the_endpoint(bench: Bench) -> None:
    bench.reading("a")
    bench.reading("b")
    bench.reader.on_completion(ReadEnded(("a", 0), "no such block"), 0.0)
    assert bench.outcome("b") == [FirstTokens, LoadReady]
    assert bench.transport.disconnects == []


def test_no_endpoint_in_time(bench: Bench) -> None:
    bench.begin("a")
    bench.answer()
    bench.reader.tick(CONTEXT.connect_deadline_s)
    assert bench.outcome("a") == [LoadFailure.UNREACHABLE, LoadDrained]
    bench.reader.on_completion(Connected(bench.transport.connects[0]), 2.0)
    bench.begin("b")
    bench.answer()
    bench.reader.on_completion(ConnectFailed(bench.transport.connects[1], "refused"), 0.0)
    assert bench.outcome("b") == [LoadFailure.UNREACHABLE, LoadDrained]


def test_a_lost_connection_shortens_the_wait(bench: Bench) -> None:
    bench.reading("a")
    bench.reader.on_lost(OWNER, 0.0)
    bench.reader.tick(LOST_GRACE_S)
    assert bench.outcome("a")[-1] is LoadFailure.UNREACHABLE


def test_a_lost_connection_that_comes_back_costs_nothing(bench: Bench) -> None:
    ticket = bench.reading("a")
    bench.reader.on_lost(OWNER, 0.0)
    assert isinstance(bench.sent[-1], Renew)
    bench.announce(ticket)
    bench.reader.tick(LOST_GRACE_S)
    assert LoadFailed not in [type(event) for event in bench.events]


def test_after_a_silence_the_next_loads_wait_a_moment_only(bench: Bench) -> None:
    """Behind a cut network each load would wait `silence_s` for nothing. A word of the peer gives the patience back."""
    limits, now = PullLimits(), 50.0
    bench.finished("a")
    bench.begin("b")
    bench.reader.tick(limits.silence_s)
    assert bench.outcome("b") == [LoadFailure.PEER_FROZEN, LoadDrained]
    ticket = bench.begin("c", now=now)
    bench.reader.tick(now + DOUBT_S)
    assert bench.outcome("c") == [LoadFailure.PEER_FROZEN, LoadDrained]
    bench.announce(ticket, now + DOUBT_S)  # late, and yet a word
    assert len(bench.transport.disconnects) == 1, "what was cut stands still for long"
    bench.begin("d", now=now)
    bench.reader.tick(now + DOUBT_S)
    assert bench.outcome("d") == []
    bench.reader.tick(now + limits.silence_s)
    assert bench.outcome("d")[-1] is LoadDrained


def doubted(bench: Bench) -> float:
    """A peer with an endpoint that is up has left a question unanswered. Returns a later time."""
    bench.finished("a")
    bench.begin("b")
    bench.reader.tick(PullLimits().silence_s)
    assert bench.outcome("b") == [LoadFailure.PEER_FROZEN, LoadDrained]
    return 50.0


def test_the_load_with_the_answer_that_ends_a_silence_is_read_over_a_new_endpoint(bench: Bench) -> None:
    now = doubted(bench)
    ticket = bench.begin("c", now=now)
    bench.announce(ticket, now)
    assert len(bench.transport.disconnects) == 1
    bench.answer()
    assert bench.transport.connects[-1] not in bench.transport.disconnects
    bench.up()
    assert bench.outcome("c") == [FirstTokens, LoadReady]
    bench.reader.reserve(LoadSpec("c", runs(0, (8, 9)), 32), now)
    bench.finish("c", now)
    assert bench.outcome("c")[-1] is LoadDone


def test_one_answer_gives_all_loads_of_the_peer_their_patience_back(bench: Bench) -> None:
    now = doubted(bench)
    ticket, _ = bench.begin("c", now=now), bench.begin("d", now=now)
    bench.announce(ticket, now)
    bench.reader.tick(now + 2 * DOUBT_S)
    assert bench.outcome("d") == [], "its answer comes with the others that have waited"
    bench.reader.tick(now + PullLimits().silence_s)
    assert bench.outcome("d") == [LoadFailure.PEER_FROZEN, LoadDrained]


def test_a_read_that_outlasts_a_silence_goes_on(bench: Bench) -> None:
    """P's process stood still for some seconds: what it has computed is not computed again."""
    other = bench.begin("b", now=0.0)
    bench.reading("a", now=1.0)
    bench.reader.tick(PullLimits().silence_s)
    assert bench.outcome("b") == [LoadFailure.PEER_FROZEN, LoadDrained]
    bench.announce(other, 6.0)
    assert bench.transport.disconnects == []
    bench.finish("a", 6.0)
    assert bench.outcome("a")[-1] is LoadDone


def test_a_boot_that_was_never_silent_is_not_doubted(bench: Bench) -> None:
    now = doubted(bench)
    bench.begin("c", epoch=2, now=now)
    bench.reader.tick(now + DOUBT_S)
    assert bench.outcome("c") == [], "it may have just started"


def test_after_a_greeting_without_answer_the_next_loads_wait_a_moment_only(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.begin("a")
    bench.reader.tick(CONTEXT.connect_deadline_s)
    assert bench.outcome("a") == [LoadFailure.UNREACHABLE, LoadDrained]
    bench.begin("b", now=50.0)
    bench.reader.tick(50.0 + DOUBT_S)
    assert bench.outcome("b") == [LoadFailure.PEER_FROZEN, LoadDrained]
    (told,) = caplog.messages
    assert told.startswith("prefill node P does not answer at owner:1")


def test_a_read_that_hangs_costs_the_endpoint(bench: Bench) -> None:
    bench.reading("a")
    bench.reader.cancel("a", 0.0)
    assert bench.reader.loads.num_quarantined_blocks == 2
    assert bench.reader.next_timer() == CONTEXT.drain_deadline_s
    bench.reader.tick(CONTEXT.drain_deadline_s)
    assert len(bench.transport.disconnects) == 1
    assert bench.outcome("a")[-1] is LoadFailure.CANCELLED
    assert bench.reader.next_timer() == float("inf"), "only the transport's word ends it now"
    bench.reader.on_completion(ReadEnded(("a", 0), "torn down"), 9.0)
    assert bench.outcome("a")[-1] is LoadDrained
    assert bench.reader.loads.num_quarantined_blocks == 0


def test_idle_peers_are_forgotten(bench: Bench) -> None:
    bench.reading("a")
    bench.reader.cancel("a", 0.0)
    bench.reader.on_completion(ReadEnded(("a", 0)), 0.0)
    bench.reader.tick(PEER_IDLE_S)
    assert bench.forgotten == [OWNER]
    assert len(bench.transport.disconnects) == 1


def test_a_peer_is_idle_from_the_end_of_its_last_load_on(bench: Bench) -> None:
    bench.reading("a", now=PEER_IDLE_S - 2.0)
    bench.finish("a", PEER_IDLE_S - 1.0)
    assert bench.outcome("a")[-1] is LoadDone
    bench.reader.tick(PEER_IDLE_S)
    assert bench.forgotten == []
    assert bench.transport.disconnects == []
    assert bench.reader.next_timer() == 2 * PEER_IDLE_S - 1.0
    bench.reader.tick(2 * PEER_IDLE_S - 1.0)
    assert bench.forgotten == [OWNER]


def test_a_lost_owner_is_tried_only_while_something_is_wanted_of_it(bench: Bench) -> None:
    bench.reading("a")
    bench.reader.on_lost(OWNER, 1.0)
    bench.reader.tick(1.0)
    assert bench.forgotten == [], "it may have restarted"
    bench.reader.tick(1.0 + LOST_GRACE_S)
    assert bench.outcome("a")[-1] is LoadFailure.UNREACHABLE
    assert bench.forgotten == [OWNER], "although its read is still in flight"
    bench.reader.tick(2.0 + LOST_GRACE_S)
    assert bench.forgotten == [OWNER]


def test_an_owner_lost_while_idle_is_not_tried_and_keeps_its_endpoint(bench: Bench) -> None:
    bench.reading("a")
    bench.finish("a")
    bench.reader.tick(1.0)
    assert bench.forgotten == []
    bench.reader.on_lost(OWNER, 2.0)
    bench.reader.tick(2.0)
    assert bench.forgotten == [OWNER]
    assert bench.transport.disconnects == [], "the control connection alone may have broken"
    bench.reading("b", now=3.0)
    bench.reader.tick(3.0)
    assert bench.forgotten == [OWNER]


def test_a_read_of_one_load_is_progress_for_all_of_its_peer(bench: Bench) -> None:
    """Theirs were queued behind it."""
    tickets = {load_id: bench.reading(load_id) for load_id in "abc"}
    read_s = PullLimits().read_s
    for i, load_id in enumerate(tickets):
        now = (i + 1) * (read_s - 1.0)
        for other in tickets.values():
            bench.announce(other, now)  # P is not silent
        bench.reader.tick(now)
        bench.finish(load_id, now)
        assert bench.outcome(load_id)[-1] is LoadDone


def test_a_lease_of_two_loads_is_left_when_the_last_one_fails(bench: Bench) -> None:
    """P knows readers, not loads: word that one load has left would end the lease under the other."""
    first = bench.reading("a", lease_id="shared")
    bench.reading("b", lease_id="shared")
    bench.reader.cancel("a", 0.0)
    bench.reader.on_completion(ReadEnded(("a", 0)), 0.0)
    assert bench.outcome("a")[-1] is LoadDrained
    assert bench.releases() == []
    bench.reader.tick(PullLimits().renew_every_s)
    assert bench.sent[-1] == Renew(first.lease), "the other one keeps the lease alive"
    bench.reader.cancel("b", 3.0)
    assert bench.releases() == [Release(first.lease, done=False)]


def test_a_lease_of_two_loads_is_done_when_the_last_one_is(bench: Bench) -> None:
    first = bench.reading("a", lease_id="shared")
    bench.reading("b", lease_id="shared")
    bench.finish("a")
    assert bench.releases() == []
    bench.finish("b")
    assert bench.outcome("b")[-1] is LoadDone
    assert bench.releases() == [Release(first.lease, done=True)]


def test_unknown_peers_loads_and_leases_are_ignored(bench: Bench) -> None:
    bench.reading("a")
    before = list(bench.events)
    bench.reader.on_message(("elsewhere", 1), LeaseState(LeaseRef("P", 1, "x"), 0, 1, 0, ()), 0.0)
    bench.reader.on_message(OWNER, LeaseState(LeaseRef("P", 1, "x"), 0, 1, 0, ()), 0.0)
    bench.reader.on_completion(ReadEnded(("unknown", 3)), 0.0)
    bench.reader.reserve(LoadSpec("unknown", runs(0, ()), 0), 0.0)
    bench.reader.cancel("unknown", 0.0)
    bench.reader.on_lost(("elsewhere", 1), 0.0)
    assert bench.events == before


@pytest.mark.parametrize("wrong", [{"fingerprint": "other"}, {"layout": full_layout(32)}])
def test_a_ticket_of_another_model_is_refused_without_a_word_to_its_owner(bench: Bench, wrong: dict[str, Any]) -> None:
    ticket = Ticket("r", LeaseRef("P", 1, "x"), 0, 1e12, "f", LAYOUT, b"d", 32, 1, *OWNER)
    bench.reader.begin("a", msgspec.structs.replace(ticket, **wrong), 30.0, 0.0)
    assert bench.outcome("a") == [LoadFailure.REJECTED, LoadDrained]
    assert bench.sent == []
    assert bench.counters.failed[LoadFailure.REJECTED] == 1
    assert bench.reader.loads.num_loads == 0


def test_an_owner_that_answers_no_greeting_fails_those_that_wait_for_it_and_no_others(bench: Bench) -> None:
    bench.reading("old", epoch=1)
    bench.begin("new", epoch=2)
    bench.reader.tick(CONTEXT.connect_deadline_s)
    assert bench.outcome("new") == [LoadFailure.UNREACHABLE, LoadDrained]
    assert bench.outcome("old") == [FirstTokens, LoadReady]
    (failed,) = [event for event in bench.events if isinstance(event, LoadFailed)]
    assert failed.detail == "no answer to a greeting"
    assert bench.transport.disconnects == []


def test_greetings_are_repeated_each_with_the_nonce_of_its_attempt(bench: Bench) -> None:
    bench.begin("a")
    bench.reader.tick(0.2)
    hellos = [message for message in bench.sent if isinstance(message, Hello)]
    assert len(hellos) == 1, "not before its time"
    assert bench.reader.next_timer() == HELLO_EVERY_S
    bench.reader.tick(HELLO_EVERY_S)
    first = bench.hello()
    assert first == hellos[0]
    bench.reader.tick(CONTEXT.connect_deadline_s)
    bench.begin("b")
    assert bench.hello().nonce != first.nonce
    reply = HelloReply("P", 1, "f", LAYOUT, b"there", transport_checksum(b"there"), first.nonce)
    bench.reader.on_message(OWNER, reply, 0.0)
    assert bench.transport.connects == [], "an answer to the attempt that was given up"


def test_a_lost_connection_shortens_the_greeting_of_those_that_come_after(bench: Bench) -> None:
    bench.begin("a")
    bench.reader.on_lost(OWNER, 0.2)
    bench.begin("b", now=0.5)
    bench.reader.tick(0.2 + LOST_GRACE_S - 0.1)
    assert bench.outcome("b") == []
    bench.reader.tick(0.2 + LOST_GRACE_S)
    assert bench.outcome("b") == [LoadFailure.UNREACHABLE, LoadDrained]


def test_a_connection_lost_again_and_again_prolongs_no_greeting(bench: Bench) -> None:
    bench.begin("a")
    bench.reader.on_lost(OWNER, CONTEXT.connect_deadline_s - 0.1)
    bench.reader.tick(CONTEXT.connect_deadline_s)
    assert bench.outcome("a") == [LoadFailure.UNREACHABLE, LoadDrained]


def test_the_transports_word_on_an_endpoint_that_was_given_up_changes_nothing(bench: Bench) -> None:
    bench.begin("old", epoch=1)
    bench.answer(epoch=1)
    (stale,) = bench.transport.connects
    ticket = bench.begin("new", epoch=2)
    bench.answer(epoch=2)
    bench.announce(ticket)
    assert bench.transport.disconnects == [stale]
    assert bench.transport.connects[1] != stale
    bench.reader.on_completion(Connected(stale), 0.0)
    assert bench.outcome("new") == [FirstTokens]
    bench.reader.on_completion(ConnectFailed(stale, "refused"), 0.0)
    nowhere = PeerKey(("elsewhere", 1), "P", 1, 1)
    bench.reader.on_completion(Connected(nowhere), 0.0)
    bench.reader.on_completion(ConnectFailed(nowhere, "refused"), 0.0)
    assert bench.outcome("new") == [FirstTokens]
    bench.up()
    assert bench.outcome("new") == [FirstTokens, LoadReady]


def test_endpoints_of_one_owner_are_told_apart(bench: Bench) -> None:
    """A completion of the one before must not be taken for one of this."""
    for load_id in ("a", "b", "c"):
        bench.begin(load_id)
        bench.answer()
        bench.reader.on_completion(ConnectFailed(bench.transport.connects[-1], "refused"), 0.0)
        assert bench.outcome(load_id)[-1] is LoadDrained
    assert len(set(bench.transport.connects)) == 3


def test_a_reply_that_does_not_match_costs_the_endpoint_too(bench: Bench) -> None:
    bench.reading("old", epoch=1)
    bench.begin("new", epoch=2)
    bench.answer(epoch=2, fingerprint="other")
    assert bench.transport.disconnects == bench.transport.connects
    assert bench.outcome("old")[-1] is LoadFailure.REJECTED
    assert bench.outcome("new") == [LoadFailure.REJECTED, LoadDrained]


def test_an_unasked_reply_of_the_epoch_that_is_read_is_no_news(bench: Bench) -> None:
    bench.reading("a")
    num_sent = len(bench.sent)
    reply = HelloReply("P", 1, "f", LAYOUT, b"there", transport_checksum(b"there"), b"")
    bench.reader.on_message(OWNER, reply, 0.0)
    assert len(bench.sent) == num_sent


def test_a_reply_is_no_reason_to_ask_where_nothing_is_read(bench: Bench) -> None:
    bench.reading("a")
    bench.finish("a")
    num_sent = len(bench.sent)
    reply = HelloReply("P", 9, "f", LAYOUT, b"there", transport_checksum(b"there"), b"")
    bench.reader.on_message(OWNER, reply, 0.0)
    assert len(bench.sent) == num_sent


def test_an_owner_speaks_of_its_own_leases_only(bench: Bench) -> None:
    """Also when another's has the same id."""
    there = ("elsewhere", 1)
    mine = bench.reading("a", lease_id="same")
    theirs = Ticket("r", LeaseRef("Q", 1, "same"), 0, 1e12, "f", LAYOUT, b"d", 32, 1, *there)
    bench.reader.begin("b", theirs, 30.0, 0.0)
    ended = LeaseState(mine.lease, 0, 9, 0, (), ended=LeaseEnd.EXPIRED)
    bench.reader.on_message(there, ended, 0.0)
    assert bench.outcome("a") == [FirstTokens, LoadReady]
    bench.reader.on_message(there, msgspec.structs.replace(ended, lease=theirs.lease), 0.0)
    assert bench.outcome("a") == [FirstTokens, LoadReady]
    assert bench.outcome("b") == [LoadFailure.LEASE_ENDED, LoadDrained]
    bench.reader.on_message(OWNER, ended, 0.0)
    assert bench.outcome("a")[-1] is LoadFailure.LEASE_ENDED


def test_a_load_that_drains_on_a_former_endpoint_is_no_matter_of_the_next_one(bench: Bench) -> None:
    """Its read may hang for as long as the peer does: the endpoint that was made since must not be torn down for it."""
    bench.reading("a")
    bench.reader.cancel("a", 0.0)
    bench.reader.tick(CONTEXT.drain_deadline_s)
    ticket = bench.begin("b", now=2.0)
    bench.answer()
    key = bench.up()
    assert bench.reader.loads.num_quarantined_loads == 1
    assert bench.reader.next_timer() > 2.0, "or the thread would turn without a pause"
    bench.reader.tick(2.0)
    assert key not in bench.transport.disconnects
    bench.announce(ticket, 2.0)
    bench.reader.reserve(LoadSpec("b", runs(0, (10, 11)), 32), 2.0)
    bench.finish("b", 2.5)
    assert bench.outcome("b") == [FirstTokens, LoadReady, LoadDone]
    bench.reader.on_completion(ReadEnded(("a", 0), "torn down"), 3.0)
    assert bench.outcome("a")[-1] is LoadDrained


def test_what_was_read_is_counted(bench: Bench) -> None:
    reader, counters = bench.reader, bench.counters
    bench.reading("a", now=1.0)
    bench.reading("b", now=1.0)
    assert (reader.loads.num_loads, reader.loads.num_reading) == (2, 0)
    bench.reader.on_completion(ReadEnded(("b", 0)), 2.0)
    assert (reader.loads.num_loads, reader.loads.num_reading) == (2, 1)
    bench.finish("a", 3.0)
    assert (counters.done, sum(counters.group_bytes), counters.transfer_s) == (1, 2 * LAYOUT.block_bytes, 2.0)
    bench.reader.cancel("b", 3.0)
    assert counters.failed[LoadFailure.CANCELLED] == 1
    bench.reading("c", now=3.0)
    bench.finish("c", 4.0)
    assert (counters.done, sum(counters.group_bytes), counters.transfer_s) == (2, 4 * LAYOUT.block_bytes, 3.0)
    bench.reading("d", now=5.0)
    bench.reader.cancel("d", 5.0)
    assert (reader.loads.num_loads, reader.loads.num_reading) == (1, 0)
    assert (reader.loads.num_quarantined_loads, reader.loads.num_quarantined_blocks) == (1, 2)


def test_a_load_that_is_given_up_counts_once_under_its_reason(bench: Bench) -> None:
    ticket = bench.reading("a")
    bench.reader.cancel("a", 1.0, LoadFailure.NO_ROOM)
    bench.reader.cancel("a", 1.0)
    assert {reason: count for reason, count in bench.counters.failed.items() if count} == {LoadFailure.NO_ROOM: 1}
    assert bench.releases() == [Release(ticket.lease, done=False)]


def test_shutdown_fails_every_load_and_gives_every_endpoint_up(bench: Bench) -> None:
    first, second = bench.reading("a"), bench.reading("b")
    bench.reader.cancel_all(1.0)
    assert bench.outcome("a")[-1] is bench.outcome("b")[-1] is LoadFailure.CANCELLED
    assert bench.releases() == [Release(first.lease, done=False), Release(second.lease, done=False)]
    assert bench.transport.disconnects == bench.transport.connects


@pytest.mark.parametrize(("announced_at", "age_s"), [(1e9 + 3.5, 0.5), (1e9 + 9.0, 0.0), (0.0, 0.0)])
def test_an_announcement_is_as_old_as_the_clocks_say(announced_at: float, age_s: float) -> None:
    bench = Bench()
    ticket = bench.begin("a")
    bench.answer()
    bench.up()
    state = LeaseState(
        ticket.lease,
        0,
        5,
        32,
        runs(0, (1, 2)),
        (SampledToken(1),),
        announced_at=announced_at,
        prefill=PrefillFacts(0.75, 0.25, 16),
    )
    bench.reader.on_message(OWNER, state, 0.0)
    bench.reader.reserve(LoadSpec("a", runs(0, (8, 9)), 32), 0.0)
    bench.finish("a", 1.0)
    (tokens,) = [event for event in bench.events if isinstance(event, FirstTokens)]
    (done,) = [event for event in bench.events if isinstance(event, LoadDone)]
    assert tokens.prefill == PrefillFacts(0.75, 0.25, 16)
    assert done.steps.announce_s == age_s
