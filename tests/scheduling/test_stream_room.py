"""How many streams a node holds within their target, and what its prompts take of the time."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pd_cluster.scheduling.step_model import StepModel, StepWork
from pd_cluster.scheduling.stream_room import (
    FADE_S,
    HELD,
    KEPT_STEP,
    LATE,
    SPARE_MEMORY,
    SPARE_SLOTS,
    USUAL_CONTEXT,
    StreamRoom,
)
from pd_connectors.protocol.feed import NodeLoad

TPOT_S, SLOTS = 0.010, 256
MODEL = StepModel([(StepWork(num, USUAL_CONTEXT * num), 4e-3 + num * 50e-6) for num in (1, 32, 128)])


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def room(tpot_s: float = TPOT_S, model: StepModel = MODEL, *, prompts_first: bool = False) -> tuple[StreamRoom, Clock]:
    clock = Clock()
    made = StreamRoom(tpot_s, SLOTS, model, clock)
    made.prompts_first = prompts_first
    return made, clock


def read(made: StreamRoom, clock: Clock, share: float, seconds: float = 20 * FADE_S) -> None:
    """Steps of prompts alone that take `share` of the next `seconds`."""
    for _ in range(round(seconds / 0.1)):
        clock.now_s += 0.1
        made.note(StepWork(num_tokens=1000), 0.1 * share)


@pytest.mark.long
@given(num_streams=st.integers(0, SLOTS), tpot_s=st.floats(0.003, 0.03), context=st.integers(1, 8000))
def test_one_stream_more_than_there_is_room_for_misses_the_target(
    num_streams: int, tpot_s: float, context: int
) -> None:
    made, _ = room(tpot_s)
    made.note(StepWork(10, 10 * context), 0.005)
    held = num_streams + made.beside(num_streams)
    assert num_streams == held or MODEL.decode_s(held, held * context) <= HELD * tpot_s
    assert held >= SLOTS or MODEL.decode_s(held + 1, (held + 1) * context) > HELD * tpot_s


def test_prompts_take_room_where_they_come_first() -> None:
    idle = room(prompts_first=True)[0].beside(0)
    found: list[int] = []
    for prompts_first in (True, False):
        made, clock = room(prompts_first=prompts_first)
        read(made, clock, 0.25)
        assert made.share == pytest.approx(0.25, rel=0.05)
        found.append(made.beside(0))
    held, beside = found
    assert beside == idle, "a decode node's prompts take only what its streams leave"
    assert MODEL.decode_s(held, held * USUAL_CONTEXT) == pytest.approx(0.75 * HELD * TPOT_S, rel=0.03)


def test_a_share_fades_and_is_never_more_than_all() -> None:
    made, clock = room(prompts_first=True)
    read(made, clock, 1.2)
    assert made.share == 1.0
    assert made.beside(0) == 0
    clock.now_s += 3 * FADE_S
    assert made.share < 0.1
    assert made.beside(0) > 0


def test_only_what_prompts_add_to_a_step_counts() -> None:
    made, clock = room(prompts_first=True)
    alone_s = MODEL.decode_s(32, 32 * USUAL_CONTEXT)
    for _ in range(2000):
        clock.now_s += 2 * alone_s
        made.note(StepWork(32, 32 * USUAL_CONTEXT, 100), 1.5 * alone_s)
    assert made.share == pytest.approx(0.25, rel=0.05)


def test_one_long_stream_that_has_ended_shuts_no_node() -> None:
    made, clock = room(prompts_first=True)
    idle = made.beside(0)
    made.note(StepWork(1, 1_000_000), 0.02)
    assert made.beside(0) == 0
    clock.now_s += 20 * FADE_S
    assert made.beside(0) == idle


def test_prompts_find_slots_and_memory_where_they_come_first() -> None:
    for prompts_first in (True, False):
        made, _ = room(10.0, prompts_first=prompts_first)
        assert made.beside(0) == SLOTS * (1 - SPARE_SLOTS * prompts_first)
        assert made.beside(0, free=SPARE_MEMORY) == made.beside(0)
        assert (made.beside(0, free=SPARE_MEMORY - 0.01) == 0) == prompts_first


def test_nothing_is_known_without_a_target_or_measured_steps() -> None:
    for made, _ in (room(inf), room(model=StepModel())):
        assert not made.is_known
        assert made.beside(0) == 0
    assert room()[0].is_known


def test_late_streams_have_more_room_where_slots_and_memory_are_left() -> None:
    """The same sums with a longer target."""
    made, clock = room(prompts_first=True)
    read(made, clock, 0.4)
    load = made.filled_in(NodeLoad(free_blocks=9, num_blocks=10), 5)
    longer, its_clock = room(LATE * TPOT_S, prompts_first=True)
    read(longer, its_clock, 0.4)
    assert (load.tpot_s, load.stream_room, load.late_room) == (TPOT_S, made.beside(5), longer.beside(5))
    assert 0 < load.stream_room < load.late_room
    assert made.filled_in(NodeLoad(free_blocks=4, num_blocks=10), 5).late_room == 0
    nothing = NodeLoad(free_blocks=9, num_blocks=10)
    assert room(inf)[0].filled_in(nothing, 5) == nothing


def drafted(num: int, num_drafts: int) -> StepWork:
    """Decodes with so many drafts each."""
    drafts, context = num * num_drafts, USUAL_CONTEXT
    return StepWork(num, num * context, 0, 0, drafts, drafts * (context + 1), num if num_drafts else 0)


def draft(made: StreamRoom, clock: Clock, num: int, num_drafts: int, num_accepted: int) -> None:
    """Steps of `num` streams for some time, of which each has `num_drafts` and `num_accepted` are right."""
    for _ in range(400):
        clock.now_s += FADE_S / 50
        made.note(drafted(num, num_drafts), 0.005, num * num_accepted)


def test_streams_that_get_several_tokens_a_step_leave_room_for_others() -> None:
    """As many as have their tokens in time, if those to come have one a step. A step takes as long as it does."""
    made, clock = room()
    idle = made.beside(0)
    draft(made, clock, 100, 2, 1)
    longer = MODEL.seconds(drafted(100, 2)) / MODEL.decode_s(100, 100 * USUAL_CONTEXT)
    assert made.pace == pytest.approx(2 / longer, rel=0.01)
    assert made.beside(0) == idle, "streams to come may have no drafts"
    held = 100 + made.beside(100)
    assert 100 < idle < held
    tokens = 1 + 100 * (made.pace - 1) / held
    assert MODEL.decode_s(held, held * USUAL_CONTEXT) <= HELD * TPOT_S * tokens
    assert MODEL.decode_s(held + 1, (held + 1) * USUAL_CONTEXT) > HELD * TPOT_S * tokens * (1 - 1 / held)
    clock.now_s += 20 * FADE_S
    assert made.pace == pytest.approx(1.0)
    assert made.beside(100) == idle - 100


def test_drafts_that_are_wrong_or_few_change_no_room() -> None:
    made, clock = room()
    draft(made, clock, 100, 4, 0)
    assert made.pace == 1.0, "soon there will be none: they are worth nothing"
    made, clock = room()
    made.note(drafted(1, 16), 0.005, 16)
    assert made.pace < 1.25, "one step of one stream"


def test_without_drafts_a_stream_has_exactly_one_token_a_step() -> None:
    made, clock = room()
    for num in range(1, 500):
        clock.now_s += 0.007 * num
        made.note(drafted(num % 97, 0), 0.005)
        assert made.pace == 1.0


# --- a prefill node without a target of time per token

GAP_S = 0.040
ROOMY = NodeLoad(num_slots=SLOTS, free_blocks=900, num_blocks=1000, block_size=64)


def keeper(gap_s: float = GAP_S, *, prompts_first: bool = True, model: StepModel = MODEL) -> StreamRoom:
    made, _ = room(inf, model, prompts_first=prompts_first)
    made.gap_s = gap_s
    return made


def test_a_free_prefill_node_tells_what_memory_streams_may_take_to_their_ends() -> None:
    made = keeper()
    assert made.filled_in(ROOMY, 0).kept_tokens == 500 * 64
    assert made.filled_in(ROOMY, 3, 20_000).kept_tokens == 500 * 64 - 20_000
    assert made.filled_in(ROOMY, 3, 40_000).kept_tokens == 0, "those that it has may take all of it"
    assert made.filled_in(ROOMY, 2).step_s == MODEL.decode_s(2, 0)


@pytest.mark.parametrize("prompts_first", [True, False])
def test_a_node_without_streams_tells_the_step_of_a_stream_to_come(prompts_first: bool) -> None:
    """Not the last step of one that has ended: an idle decode node told that for ever, so none came."""
    made = keeper(prompts_first=prompts_first)
    assert made.filled_in(replace(ROOMY, step_s=0.02), 0).step_s == MODEL.decode_s(0, 0)
    assert room(model=StepModel())[0].filled_in(replace(ROOMY, step_s=0.02), 0).step_s == 0.02, "none is known"


@pytest.mark.parametrize(
    "change",
    [
        {"free_blocks": 499},
        {"num_running": round(SLOTS * (1 - SPARE_SLOTS))},
        {"num_waiting": SLOTS},
        {"num_context": 10_000_000},
    ],
)
def test_it_keeps_none_without_memory_slots_or_time_for_prompts(change: dict[str, int]) -> None:
    assert keeper().filled_in(replace(ROOMY, **change), 1).kept_tokens == 0


def test_it_keeps_none_where_gaps_have_no_bound_or_steps_are_not_known() -> None:
    for made in (keeper(inf), keeper(prompts_first=False), keeper(model=StepModel()), room(prompts_first=True)[0]):
        assert made.filled_in(ROOMY, 0).kept_tokens == 0


@pytest.mark.long
@given(num_streams=st.integers(0, 300), context=st.integers(0, 100_000), gap_s=st.floats(0.001, 0.2))
def test_its_streams_leave_prompts_the_most_of_a_step(num_streams: int, context: int, gap_s: float) -> None:
    load = replace(ROOMY, num_running=num_streams, num_context=num_streams * context)
    if keeper(gap_s).filled_in(load, num_streams).kept_tokens:
        assert MODEL.decode_s(num_streams, load.num_context) <= KEPT_STEP * gap_s
