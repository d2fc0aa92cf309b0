"""What connectors that hand requests over promise beyond blocks: first tokens, leases, identities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_connectors.base import FirstTokens, LeaseEnded, LoadFailed
from pd_connectors.protocol.errors import LeaseEnd, LoadFailure
from pd_connectors.protocol.messages import SampledToken
from tests.conformance.harness import SIZE, End
from tests.connectors.layouts import two_groups
from tests.deadlines import HANG_S, wait_until

if TYPE_CHECKING:
    from pd_connectors.protocol.ticket import Ticket
    from tests.conformance.handoffs import HandoffHarness
    from tests.conformance.harness import Reader

KIND = "handoff"
pytestmark = pytest.mark.timeout(180)


def begin(harness: HandoffHarness, reader: Reader, ticket: Ticket, what: str) -> str:
    load_id = harness.load_id(what)
    reader.node.connector.begin_load(load_id, ticket, HANG_S)
    return load_id


def test_the_last_block_may_be_partial_and_first_tokens_come_with_it(harness: HandoffHarness, reader: Reader) -> None:
    prompt, blocks = harness.prompt(2 * SIZE + 8), (30, 31, 33)
    ticket = harness.source.open(prompt.num_tokens)
    load_id = begin(harness, reader, ticket, "tail")
    for block_id in prompt.source_blocks:
        harness.source.call("stamp", block_id, prompt.version)
    harness.source.publish(ticket.lease.lease_id, prompt.source_blocks, prompt.num_tokens)
    assert reader.wait_found(load_id)
    reader.read(load_id, blocks)
    harness.source.finish(ticket.lease.lease_id, 123)
    end = reader.wait_end(load_id)
    assert end == End(2 * SIZE + 8)
    reader.check(prompt, end, blocks)
    assert reader.node.wait_for(FirstTokens, load_id).tokens == (SampledToken(123, -0.5),)
    released = LeaseEnded(ticket.lease.lease_id, LeaseEnd.RELEASED)
    wait_until(lambda: released in harness.source.call("events"), lambda: "the lease is not released")


def test_nothing_to_read_still_brings_the_first_token(harness: HandoffHarness, reader: Reader) -> None:
    prompt = harness.prompt(2 * SIZE)
    harness.offer(prompt)
    before = harness.bytes_read(reader)
    load_id = begin(harness, reader, harness.ticket(prompt), "full-hit")
    assert reader.wait_found(load_id)
    reader.read(load_id, (), first_block=2)
    assert reader.wait_end(load_id) == End(2 * SIZE)
    assert "FirstTokens" in reader.node.kinds(load_id)
    assert harness.bytes_read(reader) == before


def test_a_lease_that_is_held_is_read_after_it_is_finished(harness: HandoffHarness, reader: Reader) -> None:
    """As a router does that shows the ticket to D when the prompt has been read."""
    prompt = harness.prompt(2 * SIZE)
    for block_id in prompt.source_blocks:
        harness.source.call("stamp", block_id, prompt.version)
    ticket = harness.source.open(prompt.num_tokens, hold=True)
    harness.source.publish(ticket.lease.lease_id, prompt.source_blocks, prompt.num_tokens)
    harness.source.finish(ticket.lease.lease_id)
    load_id = begin(harness, reader, ticket, "held")
    assert reader.wait_found(load_id)
    reader.read(load_id, (3, 4))
    reader.check(prompt, reader.wait_end(load_id), (3, 4))
    assert reader.has(prompt, 1, 4)


def test_blocks_taken_back_and_computed_again_elsewhere(harness: HandoffHarness, reader: Reader) -> None:
    """Preemption on P: what was announced before is void, and what a step in flight announces of it too."""
    prompt, blocks = harness.prompt(4 * SIZE), (5, 6, 7, 8)
    harness.offer(prompt, 2)
    ticket = harness.ticket(prompt)
    load_id = begin(harness, reader, ticket, "retracted")
    assert reader.wait_found(load_id)
    reader.read(load_id, blocks)
    reader.wait_landed(prompt, 1, blocks[1])
    generation = harness.source.call("retract", ticket.lease.lease_id)
    for block_id in prompt.source_blocks:
        harness.source.call("stamp", block_id, 999)
    harness.source.publish(ticket.lease.lease_id, prompt.source_blocks, prompt.num_tokens, generation - 1)
    elsewhere = harness.prompt(4 * SIZE)
    for block_id in elsewhere.source_blocks:
        harness.source.call("stamp", block_id, elsewhere.version)
    harness.source.publish(ticket.lease.lease_id, elsewhere.source_blocks, prompt.num_tokens, generation)
    harness.source.finish(ticket.lease.lease_id)
    end = reader.wait_end(load_id)
    assert end.num_tokens == 0 or all(reader.has(elsewhere, index, block) for index, block in enumerate(blocks))
    harness.wait_working(reader)


def test_a_peer_that_closes_ends_its_loads_at_once(harness: HandoffHarness, reader: Reader) -> None:
    prompt, load_id = harness.prompt(4 * SIZE), harness.load_id("closed")
    harness.offer(prompt, 2)
    harness.ask(reader, prompt, load_id)
    assert reader.wait_found(load_id)
    reader.read(load_id, (1, 2, 3, 4))
    try:
        harness.source.call("close")
        end = reader.wait_end(load_id)  # by P's word or the closed connection: this reader has no other deadline
        # The transport may report the closed connection before P's message about the lease is read
        assert end.reason in (LoadFailure.LEASE_ENDED, LoadFailure.READ_FAILED)
        assert end.num_tokens == 0
    finally:
        harness.kill("peer")
        harness.restart("peer")
    harness.wait_working(reader)


def test_a_ticket_of_an_earlier_life_is_refused(harness: HandoffHarness, reader: Reader, quick_reader: Reader) -> None:
    prompt = harness.prompt(2 * SIZE)
    harness.offer(prompt)
    old = harness.ticket(prompt)
    harness.kill("peer")
    load_id = begin(harness, quick_reader, old, "unknown")
    no_answer = (LoadFailure.UNREACHABLE, LoadFailure.PEER_FROZEN, LoadFailure.PEER_RESTARTED)
    assert quick_reader.wait_end(load_id).reason in no_answer
    harness.restart("peer")
    harness.wait_working(reader)
    assert reader.wait_end(begin(harness, reader, old, "old")) == End(0, LoadFailure.PEER_RESTARTED)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"fingerprint": "other weights"}, "FingerprintMismatch"),
        ({"layout": two_groups(block_size=32)}, "LayoutMismatch"),
    ],
)
def test_a_ticket_of_other_kv_is_refused(
    harness: HandoffHarness, reader: Reader, changes: dict[str, Any], word: str
) -> None:
    before = reader.node.connector.stats()
    ticket = msgspec.structs.replace(harness.source.open(2 * SIZE), **changes)
    load_id = begin(harness, reader, ticket, word)
    assert reader.wait_end(load_id) == End(0, LoadFailure.REJECTED)
    assert word in reader.node.wait_for(LoadFailed, load_id).detail
    after = reader.node.connector.stats()
    name = "loads_failed_total|reason=rejected"
    assert after[name] == before[name] + 1
    assert after["loads_done_total"] == before["loads_done_total"]
    assert not any(bool(tensor.any()) for tensor in reader.node.cache.tensors)
