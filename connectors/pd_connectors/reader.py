"""D's half of a peer-to-peer exchange: all loads, and the peers they come from. No IO of its own, no threads.

A peer is known by its address. Its *endpoint* (the transport's connection) belongs to one boot epoch of it: a ticket of
another epoch, or word that another one lives there now, leads to a new greeting, and if that confirms it, to the old
endpoint being torn down and its loads failing as PEER_RESTARTED.

    greeting   Hello sent and repeated              -> HelloReply checked, or `connect_s` over: loads fail
    endpoint   transport.connect called             -> ready, or failed, or `connect_s` over: loads fail
    ready      loads read                           -> broken read, restart, drain deadline over, or idle: torn down

A load that failed while reads were in flight drains when the transport says that they are terminal, and only then. If
the peer has fallen silent, or after `drain_deadline_s`, the endpoint is torn down so that no new read goes there. That
need not end those in flight (over NIXL it does not: nixl/transfer.py): their blocks stay quarantined, and counted,
until they end by themselves, which may be when the peer goes on or dies.
"""

from __future__ import annotations

import logging
import time
from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING

from pd_connectors.base import ConnectorContext, Event, LoadDrained, LoadFailed, LoadSpec
from pd_connectors.block_reads import PostRead
from pd_connectors.handshake import check_reply, check_ticket
from pd_connectors.link_watch import LinkWatch
from pd_connectors.peer import Greeting, Peer, PeerEndpoint
from pd_connectors.protocol.errors import HandshakeError, LoadFailure
from pd_connectors.protocol.messages import ConfirmReply, Hello, HelloReply, LeaseState, Release, ToOwner, ToReader
from pd_connectors.pull import Emit, Pull, Send
from pd_connectors.pull_limits import LOST_GRACE_S, PullLimits
from pd_connectors.pull_table import PullTable
from pd_connectors.transport import Address, Completion, Connected, ConnectFailed, PeerKey, ReadEnded, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_connectors.protocol.messages import LeaseRef
    from pd_connectors.protocol.ticket import Ticket

HELLO_EVERY_S = 0.5

logger = logging.getLogger(__name__)


class Reader:
    """Owned by the control thread.

    ask: sends a message to an address. emit: hands an event to the engine. forget: closes the way to an address, which
    the next `ask` opens again.
    wall_clock: Unix time, for measuring how old an announcement is.
    """

    def __init__(
        self,
        context: ConnectorContext,
        limits: PullLimits,
        transport: Transport,
        ask: Callable[[Address, ToOwner], None],
        emit: Callable[[Event], None],
        forget: Callable[[Address], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._context = context
        self._limits = limits
        self._transport = transport
        self._ask = ask
        self._emit = emit
        self._forget = forget
        self._wall_clock = wall_clock
        self._peers: dict[Address, Peer] = {}
        self.loads = PullTable()  # for its gauges
        self._num_attempts = 0
        self.links = LinkWatch(self._peers, context.host)

    # from the engine

    def begin(self, load_id: str, ticket: Ticket, deadline_s: float, now: float) -> None:
        """See SchedulerHalf.begin_load. A ticket that must not be read fails the load; nothing is raised."""
        try:
            check_ticket(ticket, self._context.fingerprint, self._context.layout)
        except HandshakeError as error:
            self._emit(LoadFailed(load_id, LoadFailure.REJECTED, f"{type(error).__name__}: {error}"))
            self._emit(LoadDrained(load_id))
            return
        address = (ticket.host, ticket.port)
        peer = self._peers.setdefault(address, Peer(address, now))
        is_doubted = peer.doubts(ticket.lease)
        pull = Pull(load_id, ticket, self._context.layout, deadline_s, self._limits, now, is_doubted=is_doubted)
        self.loads.add(peer, pull)
        endpoint = peer.endpoint
        if endpoint is None or not endpoint.serves(ticket.lease):
            self._greet(peer, now)
        else:
            pull.accepted(now)
            if endpoint.ready:
                pull.connected(endpoint.key, now)
        self._carry_out(peer, pull, now)

    def reserve(self, spec: LoadSpec, now: float) -> None:
        """See WorkerHalf.recv_before. Skips a load that has failed meanwhile: its events were reported already."""
        self._with_pull(spec.load_id, lambda pull: pull.reserve(spec, now), now)

    def cancel(self, load_id: str, now: float, reason: LoadFailure = LoadFailure.CANCELLED) -> None:
        """See SchedulerHalf.cancel_load."""
        self._with_pull(load_id, lambda pull: pull.fail(reason, "cancelled", now), now)

    def cancel_all(self, now: float) -> None:
        """Shutdown: fail every load, release its lease and give its endpoint up."""
        for peer in list(self._peers.values()):
            for load_id in list(peer.pulls):
                self.cancel(load_id, now)
            self._disconnect(peer)

    # from peers and transport

    def on_message(self, owner: Address, message: ToReader, now: float) -> None:
        """A message from `owner`, in any order, possibly repeated."""
        peer = self._peers.get(owner)
        if peer is None:
            return
        peer.is_lost = False
        if peer.doubted is not None:
            self._answers_again(peer, now)
        match message:
            case HelloReply():
                self._on_hello_reply(peer, message, now)
            case LeaseState():
                age_s = max(0.0, self._wall_clock() - message.announced_at) if message.announced_at else 0.0
                self._for_lease(peer, message.lease, lambda pull: pull.lease_state(message, now, age_s), now)
            case ConfirmReply():
                self._for_lease(peer, message.lease, lambda pull: pull.confirm_reply(message, now), now)

    def _answers_again(self, peer: Peer, now: float) -> None:
        """Let its loads wait as long as ever. After a cut of the network the endpoint's TCP would stand still for as
        long again: loads that have nothing of it yet get a new one. One that reads was answered of late, so the silence
        was short: the endpoint stays, and no prompt is computed twice.
        """
        logger.info("the prefill node at %s answers again", peer.name)
        peer.doubted = None
        live = [pull for pull in peer.pulls.values() if pull.is_live]
        is_stale = peer.endpoint is not None and all(pull.is_attaching for pull in live)
        if is_stale:
            self._disconnect(peer)
        for pull in live:
            pull.trusted(now)
            if is_stale:
                pull.detached()
                self._greet(peer, now)

    def on_lost(self, owner: Address, now: float) -> None:
        """The connection to `owner` broke or was refused. A peer that lives reconnects within a moment."""
        peer = self._peers.get(owner)
        if peer is None:
            return
        peer.is_lost = True
        if peer.greeting is not None:
            peer.greeting.deadline = min(peer.greeting.deadline, now + LOST_GRACE_S)
        for pull in list(peer.pulls.values()):
            pull.lost(now)
            self._carry_out(peer, pull, now)

    def on_completion(self, completion: Completion, now: float) -> None:
        """Take a completion of the transport."""
        match completion:
            case Connected(key):
                peer = self._peers.get(key.address)
                if peer is not None and peer.endpoint is not None and peer.endpoint.key == key:
                    self._on_connected(peer, peer.endpoint, now)
            case ConnectFailed(key, detail):
                peer = self._peers.get(key.address)
                if peer is not None and peer.endpoint is not None and peer.endpoint.key == key:
                    detail = f"no data connection: {detail}"
                    self._tear_down(peer, peer.endpoint, LoadFailure.UNREACHABLE, detail, now)
            case ReadEnded():
                self._on_read_ended(completion, now)

    def tick(self, now: float) -> None:
        """Do what is due at `now`, for every peer and load."""
        for peer in list(self._peers.values()):
            for pull in list(peer.pulls.values()):
                pull.tick(now)
                self._carry_out(peer, pull, now)
            self._tick_greeting(peer, now)
            self._tick_endpoint(peer, now)
            if peer.is_lost and not peer.is_wanted:
                peer.is_lost = False
                # else ZeroMQ would connect to a dead node again and again until `peer.PEER_IDLE_S` is over
                self._forget(peer.address)
            if peer.has_idled(now):
                self._drop(peer)

    def next_timer(self) -> float:
        """When to call `tick`. inf: never."""
        timers = (peer.next_timer(self._context.drain_deadline_s) for peer in self._peers.values())
        return min(timers, default=inf)

    # inside

    def _with_pull(self, load_id: str, act: Callable[[Pull], None], now: float) -> None:
        peer = self.loads.peer_of(load_id)
        if peer is not None:
            pull = peer.pulls[load_id]
            act(pull)
            self._carry_out(peer, pull, now)

    def _for_lease(self, peer: Peer, lease: LeaseRef, act: Callable[[Pull], None], now: float) -> None:
        for pull in self.loads.of_lease(lease):
            if peer.pulls.get(pull.load_id) is pull:
                act(pull)
                self._carry_out(peer, pull, now)

    def _carry_out(self, peer: Peer, pull: Pull, now: float) -> None:
        for action in pull.take_actions():
            match action:
                case Send(Release()) if self._is_wanted(pull.ticket.lease):
                    continue  # P knows its readers by connection: this would end the lease for our other load too
                case Send(message):
                    self._ask(peer.address, message)
                case PostRead(number, remote, local):
                    assert pull.endpoint is not None, "a pull reads only once it is connected"
                    self._transport.read(pull.endpoint, (pull.load_id, number), remote, local)
                    if peer.endpoint is not None:
                        groups = zip(local, self._context.layout.groups, strict=True)
                        num_bytes = sum(len(ids) * group.block_bytes for ids, group in groups)
                        peer.link.posted((pull.load_id, number), num_bytes, now)
                case Emit(event):
                    if pull.is_unanswered and isinstance(event, LoadFailed):
                        peer.doubt(pull.ticket.lease)
                    self._emit(event)
        if pull.is_over and self.loads.remove(peer, pull):
            peer.idle_since = now

    def _is_wanted(self, lease: LeaseRef) -> bool:
        """Whether a live load of ours reads the lease. The last such load releases it."""
        return any(pull.is_live for pull in self.loads.of_lease(lease))

    def _fail(self, peer: Peer, reason: LoadFailure, detail: str, now: float, which: Callable[[Pull], bool]) -> None:
        for pull in [pull for pull in peer.pulls.values() if which(pull)]:
            pull.fail(reason, detail, now)
            self._carry_out(peer, pull, now)

    # greeting

    def _greet(self, peer: Peer, now: float) -> None:
        if peer.greeting is not None:
            return
        self._num_attempts += 1
        me = f"{self._context.engine_id}/{self._context.epoch}/{self._num_attempts}"
        nonce = blake2b(me.encode(), digest_size=8).digest()
        peer.greeting = Greeting(nonce, now, now + self._context.connect_deadline_s)
        self._tick_greeting(peer, now)

    def _tick_greeting(self, peer: Peer, now: float) -> None:
        greeting = peer.greeting
        if greeting is None:
            return
        if now >= greeting.deadline:
            peer.greeting = None
            for pull in peer.pulls.values():
                if pull.is_live and pull.endpoint is None:
                    peer.doubt(pull.ticket.lease)
            self._fail(
                peer, LoadFailure.UNREACHABLE, "no answer to a greeting", now, lambda pull: pull.endpoint is None
            )
        elif now >= greeting.hello_at:
            greeting.hello_at = now + HELLO_EVERY_S
            context = self._context
            hello = Hello(context.engine_id, context.epoch, context.fingerprint, context.layout, greeting.nonce)
            self._ask(peer.address, hello)

    def _on_hello_reply(self, peer: Peer, reply: HelloReply, now: float) -> None:
        greeting = peer.greeting
        if greeting is None or reply.nonce != greeting.nonce:
            # Not an answer to a greeting of ours. It may be old, so it only hints at another epoch there: greet.
            lives_there = (reply.engine_id, reply.epoch)
            if any(lives_there != _owner(pull) for pull in peer.pulls.values() if pull.is_live):
                self._greet(peer, now)
            return
        peer.greeting = None
        try:
            check_reply(reply, self._context.fingerprint, self._context.layout)
        except HandshakeError as error:
            detail = f"{type(error).__name__}: {error}"
            self._fail(peer, LoadFailure.REJECTED, detail, now, lambda pull: True)
            self._disconnect(peer)
            return
        there = (reply.engine_id, reply.epoch)
        detail = f"engine {reply.engine_id} epoch {reply.epoch} lives at {peer.address[0]}:{peer.address[1]} now"
        self._fail(peer, LoadFailure.PEER_RESTARTED, detail, now, lambda pull: _owner(pull) != there)
        for pull in list(peer.pulls.values()):
            pull.accepted(now)
            self._carry_out(peer, pull, now)
        if peer.endpoint is not None:
            if (peer.endpoint.key.engine_id, peer.endpoint.key.epoch) == there:
                return
            self._disconnect(peer)
        self._num_attempts += 1
        num_groups = self._context.layout.num_common(reply.layout)
        key = PeerKey(peer.address, *there, self._num_attempts, num_ranks=reply.layout.tp_size, num_groups=num_groups)
        peer.endpoint = PeerEndpoint(key, now + self._context.connect_deadline_s)
        self._transport.connect(key, reply.transport)

    # endpoint

    def _on_connected(self, peer: Peer, endpoint: PeerEndpoint, now: float) -> None:
        endpoint.ready = True
        for pull in list(peer.pulls.values()):
            if pull.is_live and endpoint.serves(pull.ticket.lease):  # one that drains stays where its reads are
                pull.connected(endpoint.key, now)
                self._carry_out(peer, pull, now)

    def _on_read_ended(self, ended: ReadEnded, now: float) -> None:
        load_id, number = ended.read_id
        peer = self.loads.peer_of(load_id)
        if peer is None:
            return
        pull = peer.pulls[load_id]
        for other in peer.pulls.values():
            other.progress(now)
        self.links.ended(peer, ended, now)
        pull.read_ended(number, ended.error, now, ended.post_s)
        self._carry_out(peer, pull, now)
        if ended.endpoint_broken and peer.endpoint is not None and peer.endpoint.key == pull.endpoint:
            detail = f"the data connection broke: {ended.error}"
            self._tear_down(peer, peer.endpoint, LoadFailure.READ_FAILED, detail, now)

    def _tick_endpoint(self, peer: Peer, now: float) -> None:
        endpoint = peer.endpoint
        if endpoint is None:
            return
        if not endpoint.ready and now >= endpoint.deadline:
            detail = f"no data connection within {self._context.connect_deadline_s:g} s"
            self._tear_down(peer, endpoint, LoadFailure.UNREACHABLE, detail, now)
            return
        for pull in peer.pulls.values():
            if pull.is_live or pull.endpoint != endpoint.key:
                continue
            if pull.is_unanswered or now - pull.failed_at >= self._context.drain_deadline_s:
                detail = f"reads of {peer.address[0]}:{peer.address[1]} did not end"
                self._tear_down(peer, endpoint, LoadFailure.READ_FAILED, detail, now)
                return

    def _tear_down(self, peer: Peer, endpoint: PeerEndpoint, reason: LoadFailure, detail: str, now: float) -> None:
        """Give the endpoint up and fail the loads that need it. The transport reports when its reads end."""
        self._fail(peer, reason, detail, now, lambda pull: endpoint.serves(pull.ticket.lease))
        self._disconnect(peer)

    def _disconnect(self, peer: Peer) -> None:
        if peer.endpoint is not None:
            key, peer.endpoint = peer.endpoint.key, None
            peer.link.forget_reads()
            self._transport.disconnect(key)

    def _drop(self, peer: Peer) -> None:
        self._disconnect(peer)
        self._forget(peer.address)
        del self._peers[peer.address]


def _owner(pull: Pull) -> tuple[str, int]:
    return pull.ticket.lease.engine_id, pull.ticket.lease.epoch
