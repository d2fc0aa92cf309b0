"""What a step takes of the offered drafts, and what is done for them before."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from pd_cluster.drafting.forced import ForcedDrafts
from pd_cluster.drafting.offer import DraftOffer
from pd_cluster.drafting.worth import EARNED, FIRST_CREDIT, LEAST_CREDIT, MOST_CREDIT, most_worth
from pd_cluster.scheduling import drafts
from pd_cluster.scheduling.batch import SequenceChunk
from pd_cluster.scheduling.drafts import Speculation
from tests.drafters import TokenDrafter
from tests.scheduling.simulation import BLOCK_SIZE, VOCAB_SIZE, message, prompt
from tests.scheduling.test_lookup_drafter import drafting_of
from tests.scheduling.world import World

if TYPE_CHECKING:
    from pd_cluster.drafting.forced import ForcedTokens
    from pd_cluster.drafting.worth import StepPrice

END = 3  # a stop token


def test_hashes_come_before_drafts_while_no_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step waits for those in any case, and takes little longer where drafts are not prepared."""
    world = World(drafts=True)
    world.submit(message("a", prompt(4 * BLOCK_SIZE)))
    world.scheduler.schedule()
    order = list[str]()

    def hashed(_: float) -> bool:
        order.append("hashes")
        return True

    monkeypatch.setattr(world.scheduler._hashes, "run", hashed)
    monkeypatch.setattr(TokenDrafter, "prepare", lambda *_: order.append("drafts"))
    drafting_of(world)._drafter = TwoOffers()
    assert world.scheduler.hash_ahead(), "hashes are left"
    assert order == ["hashes", "drafts"]


class TwoOffers(TokenDrafter):
    """Of the prompts that begin with 1 the drafts end with a token for the end, and are surer."""

    def offer(self, seq_id: int, token_ids: list[int], num_ahead: int, most: int) -> DraftOffer | None:
        drafts = [5, END, *range(5, 19)] if token_ids[0] == 1 else [*range(5, 21)]
        chance = 0.99 if token_ids[0] == 1 else 0.9
        chances = np.power(chance, np.arange(1, 1 + len(drafts))).astype(np.float32)
        return DraftOffer(drafts, chances[:most])


def test_drafts_after_an_end_displace_no_others() -> None:
    """A step has as many as it has room for: ten."""
    world = World(drafts=True, max_num_seqs=10)
    drafter = TwoOffers()
    drafting = drafting_of(world)
    drafting._drafter = drafter
    drafting._costs = Speculation(drafter)
    more: dict[str, Any] = {"max_tokens": 60, "stop_token_ids": (END,)}
    requests = [world.submit(message(f"{first}", [first] * 9, **more)) for first in (1, 2)]
    for _ in range(2):
        world.start_step()
    chunks = {chunk.seq_id: chunk for chunk in world.scheduler.schedule().chunks}
    ends, goes_on = (chunks[one.sequences[0].seq_id].drafts for one in requests)
    assert ends == (5, END)
    assert goes_on == (*range(5, 13),)


def test_nothing_forced_is_asked_for_before_steps_are_priced() -> None:
    """The first call has the worker search."""
    asked, are_priced = list[bool](), False

    def told() -> list[ForcedTokens]:
        asked.append(are_priced)
        return []

    world = World(drafts=True)
    drafting = drafting_of(world)
    drafting._costs = Speculation(drafting._drafter, is_priced=lambda: are_priced)
    drafting._forced = ForcedDrafts(told)
    world.submit(message("a", prompt(9), max_tokens=40))
    for _ in range(3):
        world.start_step()
    assert asked == []
    are_priced = True
    world.start_step()
    assert asked == [True]


def test_a_step_without_drafts_does_not_take_the_next_one_s_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps overlap it ends after the next one was planned. Of that one the node would learn nothing."""
    world = World(drafts=True)
    drafting = drafting_of(world)
    drafting._drafter = TokenDrafter()
    monkeypatch.setattr(TokenDrafter, "offer", lambda *_: None)
    noted = list[tuple[int, ...]]()

    def note(_: ForcedDrafts, *counts: int) -> bool:
        noted.append(counts)
        return False

    monkeypatch.setattr(ForcedDrafts, "note", note)
    request = world.submit(message("a", prompt(9), max_tokens=8, grammar="g"))
    while not request.finished:
        world.start_step()
    assert noted == []


class OneOffer(TwoOffers):
    """Of the prompts that begin with 1 alone."""

    def offer(self, seq_id: int, token_ids: list[int], num_ahead: int, most: int) -> DraftOffer | None:
        return super().offer(seq_id, token_ids, num_ahead, most) if token_ids[0] == 1 else None


def test_streams_earn_credit_and_gain_it_by_drafts() -> None:
    """Nothing is kept of one that has ended."""
    world = World(drafts=True)
    request = world.submit(message("a", prompt(9), max_tokens=60))
    drafting, (seq,) = drafting_of(world), request.sequences

    def credit_at(position: int) -> float:
        return drafting._credits[seq.seq_id] + EARNED * position

    assert credit_at(9) == pytest.approx(FIRST_CREDIT)
    for _ in range(2):
        world.start_step()
    drafting._credits[seq.seq_id], before = 0.0, EARNED * 12
    drafting._prolonged = 1.5
    for num_samples, gained in ((3, 1.5), (1, 1.0), (3, 2.5)):
        drafting.take(seq, SequenceChunk(seq.seq_id, 12, 4, (), 1, False, (5,) * 3), num_samples)
        assert credit_at(12) == pytest.approx(before + gained)
    drafting.take(seq, SequenceChunk(seq.seq_id, 300, 4, (), 1, False, (5,) * 3), 1)
    assert credit_at(300) == pytest.approx(MOST_CREDIT - 0.5), "all were wrong"
    world.scheduler.abort(request)
    assert drafting._credits == {}


def test_streams_without_drafts_spend_their_credit_in_a_long_step() -> None:
    for credit in (0.0, 3.0):
        world = World(drafts=True, max_num_seqs=10)
        drafter, drafting = OneOffer(), drafting_of(world)
        drafting._drafter = drafter
        drafting._costs = Speculation(drafter, gap_s=lambda: 4e-3)
        asked = [message(f"{first}", [first] * 9, max_tokens=60) for first in (1, 2)]
        one, other = (world.submit(each).sequences[0] for each in asked)
        world.start_step()
        drafting._credits |= {one.seq_id: 3.0, other.seq_id: credit - EARNED * 9}
        chunks = {chunk.seq_id: chunk for chunk in world.scheduler.schedule().chunks}
        assert bool(chunks[one.seq_id].drafts) == bool(credit)
        if credit:
            assert drafting._prolonged > 1.25
            spent = drafting._prolonged - 1
            assert drafting._credits[other.seq_id] + EARNED * 9 == pytest.approx(credit), "no step waits for that"
            drafting.prepare(lambda: True)
            assert drafting._credits[other.seq_id] + EARNED * 9 == pytest.approx(credit - spent)


def test_a_stream_without_drafts_waits_for_what_it_has_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all steps. The other one has drafts again and again, which prolong a step by far more than a quarter."""
    known = list[float]()

    def noted(offers: list[DraftOffer], price: StepPrice) -> list[int]:
        known.append(price.least_credit)
        return most_worth(offers, price)

    monkeypatch.setattr(drafts, "most_worth", noted)
    world = World(drafts=True, max_num_seqs=10)
    drafter, drafting = OneOffer(), drafting_of(world)
    drafting._drafter = drafter
    drafting._costs = Speculation(drafter, gap_s=lambda: 4e-3)
    one, other = (world.submit(message(f"{first}", [first] * 9, max_tokens=80)).sequences[0] for first in (1, 2))
    waited, num_prolonged = 0.0, 0
    while other.num_output_tokens < 60:
        drafting._prolonged = 1.0
        drafting._credits[one.seq_id] = 4.0  # as if its drafts were right
        world.start_step()
        waited += drafting._prolonged - 1
        num_prolonged += drafting._prolonged > 1.25
        assert waited <= FIRST_CREDIT + EARNED * (other.num_output_tokens + 1)
    assert num_prolonged >= 3
    drafting._credits = dict.fromkeys(drafting._credits, 50.0)
    world.start_step()
    assert known[-1] == MOST_CREDIT, "at a time none waits for more"


class RandomOffers(TokenDrafter):
    """As sure as it likes. Those of streams that begin with 1 are wrong, of the others right as often as not."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def offer(self, seq_id: int, token_ids: list[int], num_ahead: int, most: int) -> DraftOffer | None:
        draw = self.random
        if draw.random() < 0.2:
            return None
        chance, num = draw.choice([0.1, 0.3, 0.9, 1.0]), draw.randint(1, most)
        token = VOCAB_SIZE if token_ids[0] == 1 else draw.choice([VOCAB_SIZE, 5])
        chances = np.power(chance, np.arange(1, 1 + num)).astype(np.float32)
        return DraftOffer([token] * num, chances, trust=draw.choice([1.0, 0.1]))


@pytest.mark.long_cases
@pytest.mark.parametrize("seed", range(12))
def test_a_stream_of_which_no_draft_is_right_waits_for_what_it_has_earned(seed: int) -> None:
    """At every token, whatever is offered for it: one with a useless draft once paid 0.7 steps at every step."""
    world, draw = World(drafts=True, max_num_seqs=10), Random(seed)
    drafter, drafting = RandomOffers(seed), drafting_of(world)
    drafting._drafter = drafter
    drafting._costs = Speculation(drafter, gap_s=lambda: draw.choice([0.0, 1e-3, 4e-3]))
    firsts = [1, *(draw.randint(1, 9) for _ in range(draw.randint(0, 7)))]
    requests = [world.submit(message(f"{at}", [first] * 9, max_tokens=60)) for at, first in enumerate(firsts)]
    wrong, waited, num_prolonged = requests[0], 0.0, 0
    (seq,) = wrong.sequences
    for _ in range(80):
        if not wrong.finished and (batch := world.start_step()) and seq.seq_id in {one.seq_id for one in batch.chunks}:
            waited += drafting._prolonged - 1
            num_prolonged += drafting._prolonged > 1
            assert waited <= FIRST_CREDIT + EARNED * (seq.num_output_tokens + 1) + 1e-9
    assert wrong.num_accepted_drafts == 0
    assert num_prolonged >= 3


def test_no_credit_is_below_the_least() -> None:
    """A step that was tried at a wrong price stops drafts for some seven tokens, not for hundreds."""
    world = World(drafts=True)
    drafting, (seq,) = drafting_of(world), world.submit(message("a", prompt(9), max_tokens=60)).sequences
    chunk = SequenceChunk(seq.seq_id, 20, 1, (), 1)
    for _ in range(3):
        drafting._spend(chunk, 30.0)
        assert drafting._credit(chunk) == pytest.approx(LEAST_CREDIT)
    assert drafting._credit(msgspec.structs.replace(chunk, start=27)) > 0


def test_a_step_that_has_no_blocks_for_drafts_charges_none() -> None:
    """Where a request waits for memory drafts get the rest of the last block alone."""
    world = World(drafts=True, max_num_seqs=10)
    drafter, drafting = OneOffer(), drafting_of(world)
    drafting._drafter = drafter
    drafting._costs = Speculation(drafter)
    requests = [world.submit(message(f"{first}", [first] * 9, max_tokens=60)) for first in (1, 2)]
    drafting._fit = lambda *_: 0  # type: ignore[method-assign]
    num_empty, num_drafted = 0, 0
    while not any(one.finished for one in requests):
        before = dict(drafting._credits)
        batch = world.start_step()
        num_drafts = sum(len(chunk.drafts) for chunk in batch.chunks)
        num_drafted += num_drafts > 0
        if not num_drafts:
            num_empty += 1
            assert drafting._prolonged == 1.0
            assert all(credit == before[seq_id] for seq_id, credit in drafting._credits.items())
    assert num_empty > 3
    assert num_drafted


def test_a_prompt_s_chunk_of_one_token_has_no_say() -> None:
    """Its credit counts from the prompt's end: of 30,000 tokens it was -1,499."""
    world = World(drafts=True, max_num_seqs=10)
    drafter, drafting = OneOffer(), drafting_of(world)
    drafting._drafter = drafter
    drafting._costs = Speculation(drafter)
    one, other = (world.submit(message(f"{first}", [first] * 9, max_tokens=60)).sequences[0] for first in (1, 2))
    for _ in range(2):
        world.start_step()
    builder = SimpleNamespace(chunks=[SequenceChunk(one.seq_id, 12, 1, (), 1), SequenceChunk(other.seq_id, 3, 1)])
    drafting._credits[other.seq_id] = -1500.0
    assert drafting._price(builder, 8).least_credit > 0  # type: ignore[arg-type]
