"""What a request waited for, phase by phase."""

from __future__ import annotations

import pytest

from pd_cluster.protocol.messages import AddRequest, Timeline
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.request_marks import Marks
from pd_cluster.scheduling.sequence import Request
from pd_connectors.base import LoadSteps
from pd_connectors.protocol.messages import NO_PREFILL, PrefillFacts


def request(marks: Marks) -> Request:
    message = AddRequest("r", [1, 2], SamplingParams(max_tokens=1))
    return Request(message, 0, marks=marks)


def test_a_prefill_counts_from_when_it_was_received() -> None:
    marks = Marks(arrived_s=1.0, scheduled_s=1.5, first_token_s=3.5)
    assert request(marks).marks.timeline() == Timeline(queue_s=0.5, prefill_s=2.0)
    assert request(marks).marks.prefill_facts(0) == PrefillFacts(2.5, 0.5)
    assert Marks(arrived_s=1.0).prefill_facts(0) == NO_PREFILL
    assert Marks(arrived_s=1.0).timeline().phases() == {}


def test_a_load_has_all_its_steps() -> None:
    steps = LoadSteps(announce_s=0.125, reserve_s=0.0, post_s=0.25, link_s=0.5, confirm_s=0.0625, wake_s=0.03125)
    marks = Marks(
        arrived_s=1.0, reserved_s=2.0, loaded_s=3.0, decode_scheduled_s=3.0, decode_retired_s=3.5,
        peer=PrefillFacts(1.75, 0.75), load_steps=steps,
    )  # fmt: skip
    assert request(marks).marks.timeline().phases() == {
        "queue": 1.0, "transfer": 1.0, "admit": 0.0, "first_decode": 0.5, "prefill_leg": 1.75,
        "prefill_queue": 0.75, "announce": 0.125, "reserve": 0.0, "post": 0.25, "link": 0.5,
        "confirm": 0.0625, "schedule": 0.03125,
    }  # fmt: skip


def test_what_was_not_computed_took_no_time_that_could_be_told() -> None:
    """Aborted before its first decode; and its prefill node, of an older release, does not say what that took."""
    marks = Marks(arrived_s=1.0, reserved_s=2.0, loaded_s=3.0, load_steps=LoadSteps(link_s=0.5))
    assert set(request(marks).marks.timeline().phases()) == {
        "queue", "transfer", "admit", "announce", "reserve", "post", "link", "confirm", "schedule",
    }  # fmt: skip


@pytest.mark.parametrize(("received_s", "arrived_s"), [(4.0, 4.0), (0.0, 5.0)])
def test_arrival_is_what_the_api_process_says(received_s: float, arrived_s: float) -> None:
    message = AddRequest("r", [1, 2], SamplingParams(max_tokens=1), received_s=received_s)
    one = Request.from_message(message)
    one.begin(0, 5.0, iter(range(9)), frozenset(), 100)
    assert one.marks.arrived_s == arrived_s


def test_a_timeline_is_taken_once_when_its_phases_are_over() -> None:
    """Also if a stop string, which only the API process sees, ends the answer."""
    one = request(Marks(arrived_s=1.0, scheduled_s=1.5))
    assert one.marks.take_timeline(finished=False) is None, "its prefill goes on"
    one.marks.first_token_s = 3.5
    assert one.marks.take_timeline(finished=False) == Timeline(queue_s=0.5, prefill_s=2.0)
    assert one.marks.take_timeline(finished=True) is None

    loaded = request(Marks(arrived_s=1.0, reserved_s=2.0, loaded_s=3.0))
    assert loaded.marks.take_timeline(finished=False) is None, "its first decode step goes on"
    loaded.marks.decode_scheduled_s, loaded.marks.decode_retired_s = 3.0, 3.5
    assert loaded.marks.take_timeline(finished=False) is not None
