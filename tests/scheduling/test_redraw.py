"""Which first tokens a request gets when its loads fail and follow each other. The connector is the test's script."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from pd_cluster.engine.kv_transfers import KvTransfers
from pd_cluster.engine.redraw import Redraw
from pd_cluster.protocol.messages import AddRequest, FromEngine, NeedsPrefill, Work
from pd_cluster.protocol.sampling_params import BeamParams
from pd_connectors.base import Event, FirstTokens, LoadDone, LoadDrained, LoadFailed, LoadReady
from pd_connectors.null import NullConnector
from pd_connectors.protocol.errors import LoadFailure
from pd_connectors.protocol.messages import LeaseRef, SampledToken, TopLogprob
from pd_connectors.protocol.ticket import Ticket
from tests.connectors.layouts import full_layout
from tests.scheduling.kv_groups import FULL_WINDOW_STATE, ONE_FULL, GroupSet
from tests.scheduling.simulated_client import Client
from tests.scheduling.simulation import BLOCK_SIZE, VOCAB_SIZE, begun, message, prompt
from tests.scheduling.world import World

DEADLINE_S = 30.0
N = 2
OFFER = message("r", prompt(3 * BLOCK_SIZE), work=Work.TAKE_OVER, max_tokens=5, n=N)
EQUAL = Ticket(
    request_id="on-p",
    lease=LeaseRef("p", 1, "lease"),
    generation=0,
    expires_at_s=9e9,
    fingerprint="f",
    layout=full_layout(BLOCK_SIZE, 1, 1, 1, "float32"),
    prompt_digest=b"",
    num_tokens=len(OFFER.prompt_token_ids),
    num_samples=N,
    host="p",
    port=1,
    sampling_digest=OFFER.sampling.first_token_digest,
)
TICKETS: dict[str, Ticket] = {
    "equal": EQUAL,
    Redraw.MISMATCH: msgspec.structs.replace(EQUAL, num_samples=3, sampling_digest=b"another"),
    Redraw.UNKNOWN: msgspec.structs.replace(EQUAL, sampling_digest=b""),
}


class ScriptedConnector(NullConnector):
    """Loads end as the test says."""

    def __init__(self) -> None:
        self.load_id = ""  # the last one begun
        self.cancelled: list[str] = []
        self._events = []

    def begin_load(self, load_id: str, ticket: Ticket, deadline_s: float) -> None:
        self.load_id = load_id

    def cancel_load(self, load_id: str, reason: LoadFailure = LoadFailure.CANCELLED) -> None:
        self.cancelled.append(load_id)

    def tell(self, *events: Event) -> None:
        self._events += events


class DecodeNode:
    """A world behind `KvTransfers`, and one request that takes KV over."""

    def __init__(self, ticket: Ticket | None, asked: AddRequest = OFFER, kv: GroupSet = ONE_FULL) -> None:
        self.world = World(kv=kv)
        self.replies: list[FromEngine] = []
        self.connector = ScriptedConnector()
        self.transfers = KvTransfers(
            self.connector, self.world.scheduler, self.replies.append, self.world.take, keeps_states=kv.has_state
        )
        self.request = self.world.request(msgspec.structs.replace(asked, ticket=ticket))
        outputs = [list(known) for known in asked.known] or [[] for _ in range(asked.sampling.n)]
        self.client = self.world.clients["r"] = Client(self.request, outputs, [None] * asked.sampling.n)
        self.transfers.admit(self.request)

    def hear(self, *events: Event) -> None:
        self.connector.tell(*events)
        self.transfers.take_events()
        self.transfers.reserve()

    def load(self, ticket: Ticket) -> None:
        """Until all but the end is over. P's tokens are the right ones only where it samples as D would."""
        load_id = self.connector.load_id
        self.hear(LoadReady(load_id, ticket.num_tokens))
        [load] = self.world.start_step().loads
        self.world.loads[load_id] = load, self.request
        tokens = self.world.first_tokens(self.request)
        if ticket is not EQUAL:
            others = [SampledToken((token.token_id + 1) % VOCAB_SIZE) for token in tokens]
            tokens = (*others, SampledToken(1))[: ticket.num_samples]
        self.hear(FirstTokens(load_id, tokens))

    def fail(self) -> NeedsPrefill:
        load_id = self.connector.load_id
        self.hear(LoadFailed(load_id, LoadFailure.READ_FAILED))
        load, _ = self.world.loads.pop(load_id)
        self.world.write_load(load, self.request, good=False)
        self.hear(LoadDrained(load_id))
        reply = self.replies[-1]
        assert isinstance(reply, NeedsPrefill)
        return reply

    def succeed(self) -> None:
        load_id = self.connector.load_id
        load, _ = self.world.loads.pop(load_id)
        self.world.write_load(load, self.request, good=True)
        self.hear(LoadDone(load_id, (1,), 0.0))

    def check_declined(self) -> None:
        """A load was begun only to be cancelled: so P learns that nothing will read its lease."""
        assert self.connector.cancelled == [self.connector.load_id] == ["r#1"]
        assert self.transfers.num_orphans == 1
        self.hear(LoadFailed("r#1", LoadFailure.CANCELLED), LoadDrained("r#1"))
        assert not self.transfers.num_orphans
        assert not self.replies

    def redraws(self) -> dict[str, float]:
        return {reason: self.transfers.counters[reason.counter] for reason in Redraw}


@pytest.mark.parametrize(("first", "second"), list(product(TICKETS, TICKETS)))
def test_the_last_load_decides_unless_the_tokens_are_known(first: str, second: str) -> None:
    node = DecodeNode(TICKETS[first])
    node.load(TICKETS[first])
    is_known = first == "equal"
    assert [len(output) for output in node.client.outputs] == [int(is_known)] * N
    node.fail()
    node.transfers.use_ticket("r", TICKETS[second], DEADLINE_S)
    node.load(TICKETS[second])
    assert [len(output) for output in node.client.outputs] == [int(is_known or second == "equal")] * N
    node.succeed()
    node.world.run_until_idle()
    assert node.redraws() == {reason: float(not is_known and second == reason) for reason in Redraw}
    node.world.check_empty()


@pytest.mark.parametrize("first", TICKETS)
def test_a_prefill_of_our_own_counts_as_no_redraw(first: str) -> None:
    node = DecodeNode(TICKETS[first])
    node.load(TICKETS[first])
    node.fail()
    node.transfers.prefill_locally("r")
    node.world.run_until_idle()
    assert set(node.redraws().values()) == {0.0}
    node.world.check_empty()


def test_a_p_that_breaks_its_promise_of_equal_sampling_is_not_believed() -> None:
    node = DecodeNode(EQUAL)
    node.hear(LoadReady(node.connector.load_id, EQUAL.num_tokens))
    node.hear(FirstTokens(node.connector.load_id, (SampledToken(1),)))
    reply = node.replies[-1]
    assert isinstance(reply, NeedsPrefill)
    assert reply.reason == "rejected: wrong number of first tokens"


def test_a_p_that_names_fewer_candidates_than_a_search_needs_is_not_believed() -> None:
    """With one candidate two of three beams would have no token, and would run all the same."""
    asked = message("r", prompt(3 * BLOCK_SIZE), work=Work.TAKE_OVER, max_tokens=5, n=N, beams=BeamParams(width=3))
    digest = asked.sampling.first_token_digest
    ticket = msgspec.structs.replace(EQUAL, num_samples=1, sampling_digest=digest)
    node = DecodeNode(ticket, asked)
    node.hear(LoadReady(node.connector.load_id, ticket.num_tokens))
    node.hear(FirstTokens(node.connector.load_id, (SampledToken(1, -1.0, (TopLogprob(1, -1.0),)),)))
    reply = node.replies[-1]
    assert isinstance(reply, NeedsPrefill)
    assert reply.reason == "rejected: wrong number of first tokens"


def test_a_state_is_taken_over_with_the_first_token_and_not_without(caplog: pytest.LogCaptureFixture) -> None:
    """To draw the first token here the last one of the prompt would be computed on a state that has it already."""
    caplog.set_level("INFO", "pd_cluster.engine")
    node = DecodeNode(EQUAL, kv=FULL_WINDOW_STATE)
    node.load(EQUAL)
    node.succeed()
    node.world.run_until_idle()
    assert node.transfers.counters["prefills_remote_total"] == 1
    node.world.check_empty()
    for reason in Redraw:
        node = DecodeNode(TICKETS[reason], kv=FULL_WINDOW_STATE)
        node.check_declined()
        node.world.run_until_idle()
        assert node.transfers.counters["prefills_local_total"] == 1
        node.world.check_empty()
    assert ["prompts are computed again" in record.message for record in caplog.records] == [True] * len(Redraw)


# --- an answer that has begun on another node

NUM_KNOWN = 9
BEGUN = begun(message("r", OFFER.prompt_token_ids, work=Work.TAKE_OVER, max_tokens=NUM_KNOWN + 5), NUM_KNOWN)
NUM_LOADED = len(BEGUN.prompt_token_ids) + NUM_KNOWN - 1
WITH_KNOWN = msgspec.structs.replace(TICKETS[Redraw.MISMATCH], num_tokens=NUM_LOADED, num_samples=1)


def check_rest(node: DecodeNode) -> None:
    """Nothing of what P drew is there; the world's client has compared each token."""
    node.world.run_until_idle()
    assert len(node.client.outputs[0]) == NUM_KNOWN + 5
    assert set(node.redraws().values()) == {0.0}
    node.world.check_empty()


@pytest.mark.parametrize("kv", [ONE_FULL, FULL_WINDOW_STATE])
def test_the_second_load_of_a_begun_answer_succeeds_too(kv: GroupSet) -> None:
    """D asks for the KV of prompt and known tokens but the last, and for the state after them.

    What P draws is not used, under whatever parameters.
    """
    node = DecodeNode(None, BEGUN, kv)
    assert node.replies == [NeedsPrefill("r", 0)]
    node.transfers.use_ticket("r", WITH_KNOWN, DEADLINE_S)
    node.load(WITH_KNOWN)
    assert node.fail().reason
    node.transfers.use_ticket("r", WITH_KNOWN, DEADLINE_S)
    node.load(WITH_KNOWN)
    assert node.client.outputs == [list(BEGUN.known[0])]
    node.succeed()
    check_rest(node)
    assert node.world.worker.num_tokens_computed == 5, "only the last known token and those after it"


def test_a_ticket_for_the_prompt_alone_is_refused_for_a_begun_answer() -> None:
    node = DecodeNode(None, BEGUN)
    node.transfers.use_ticket("r", TICKETS[Redraw.MISMATCH], DEADLINE_S)
    reply = node.replies[-1]
    assert isinstance(reply, NeedsPrefill)
    assert reply.reason == f"rejected: the ticket is for {EQUAL.num_tokens} tokens, not for {NUM_LOADED}"
    node.transfers.prefill_locally("r")
    check_rest(node)


@pytest.mark.parametrize(("least", "is_asked"), [(NUM_KNOWN - 1, True), (NUM_KNOWN, False)])
def test_known_tokens_count_as_the_end_of_the_prompt_that_may_be_cached(least: int, is_asked: bool) -> None:
    """D has computed the prompt before: of what is loaded it lacks the known tokens only, but the last."""
    node = DecodeNode(None, BEGUN)
    node.transfers.forget(node.request)
    node.world.take(node.world.scheduler.abort(node.request))
    node.world.submit(message("before", BEGUN.prompt_token_ids, max_tokens=1))
    node.world.run_until_idle()
    node.replies.clear()
    node.transfers.admit(node.world.request(msgspec.structs.replace(BEGUN, min_remote_tokens=least)))
    assert node.replies == [NeedsPrefill("r", len(BEGUN.prompt_token_ids))] * is_asked
