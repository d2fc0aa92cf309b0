"""What runs before what on a device's three streams, by streams that only note it."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.worker import copy_streams
from pd_cluster.worker.copy_streams import CopyStreams

if TYPE_CHECKING:
    from collections.abc import Iterator


class NotedStream:
    """In place of a stream: work that ends before what is issued next, as far as it is certain."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.num_calls = 0

    def run(self, name: str) -> set[str]:
        """Issue work. -> what is over when it begins."""
        before = set(self.done)
        self.done.add(name)
        return before

    def record_event(self) -> NotedStream:
        self.num_calls += 1
        event = NotedStream()
        event.done = set(self.done)
        return event

    def wait_event(self, event: NotedStream) -> None:
        self.num_calls += 1
        self.done |= event.done

    wait_stream = wait_event


class ThreeStreams:
    """A main stream, the copy streams, and a launch of steps as ModelRunner does it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.main = self.current = NotedStream()
        self.noted: list[NotedStream] = []
        cuda = SimpleNamespace(Stream=self._make, current_stream=lambda: self.current, stream=self._use)
        patch.setattr(copy_streams, "torch", SimpleNamespace(cuda=cuda))
        self.copies = CopyStreams(torch.device("cuda"))
        self.before: dict[str, set[str]] = {}

    def _make(self, device: object) -> NotedStream:
        self.noted.append(NotedStream())
        return self.noted[-1]

    def launch(self, step: int, *, copies: bool, waits: bool) -> Any:
        """-> the step's end, which a step that `waits` for late rows has when they are drawn."""
        self.copies.join()
        self._run(f"swap {step}")
        if copies:
            self.copies.begin(lambda: self._run(f"load {step}"), lambda: self._run(f"save {step}"))
        self._run(f"forward {step}")
        if not waits:
            return self.copies.end()
        self.copies.issue()
        assert not copies or self.before.keys() >= copies_of(step), "late rows may wait for long"
        self._run(f"draw {step}")
        return self.copies.end()

    def _run(self, name: str) -> None:
        self.before[name] = self.current.run(name)

    @contextmanager
    def _use(self, stream: NotedStream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.main


def copies_of(step: int) -> set[str]:
    return {f"load {step}", f"save {step}"}


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_copies_are_beside_their_step_and_between_the_others(steps: list[tuple[bool, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        streams = ThreeStreams(patch)
        for step, (copies, waits) in enumerate(steps):
            end = streams.launch(step, copies=copies, waits=waits)
            own = {f"swap {step}", f"forward {step}", *list(copies_of(step)) * copies, *[f"draw {step}"] * waits}
            earlier = streams.before[f"swap {step}"]
            assert end.done >= own | earlier, "whatever the step reads or writes is over at its end"
            if copies:
                for copy in copies_of(step):
                    assert streams.before[copy] >= {f"swap {step}", *earlier}
                    assert streams.before[copy].isdisjoint({f"forward {step}", *copies_of(step)})
                    assert copy not in streams.before[f"forward {step}"]
            if step and steps[step - 1][0]:
                assert copies_of(step - 1) <= earlier


def test_steps_without_copies_cost_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = ThreeStreams(monkeypatch)
    streams.launch(0, copies=True, waits=False)
    streams.launch(1, copies=False, waits=False)
    calls = streams.main.num_calls
    before = [others.num_calls for others in streams.noted]
    streams.launch(2, copies=False, waits=False)
    assert streams.main.num_calls - calls == 1
    assert [others.num_calls for others in streams.noted] == before


@pytest.mark.parametrize("runs_early", [False, True])
def test_a_cpu_copies_once_in_the_launch(runs_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyStreams, "runs_early", runs_early)
    copies, order = CopyStreams(torch.device("cpu")), list[str]()
    copies.join()
    copies.begin(lambda: order.append("load"), lambda: order.append("save"))
    order.append("forward")
    assert copies.end() is None
    copies.issue()
    assert order == (["load", "save", "forward"] if runs_early else ["forward", "load", "save"])
