"""What runs before what on a device's two streams, by streams that only note it."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.worker import copy_stream
from pd_cluster.worker.copy_stream import CopyStream

if TYPE_CHECKING:
    from collections.abc import Iterator


class NotedStream:
    """In place of a stream: work that ends before what is issued next, as far as it is certain."""

    def __init__(self, device: object = None) -> None:
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


class TwoStreams:
    """A main stream, the copy stream, and a launch of steps as ModelRunner does it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.main = self.current = NotedStream()
        cuda = SimpleNamespace(Stream=NotedStream, current_stream=lambda: self.current, stream=self._use)
        patch.setattr(copy_stream, "torch", SimpleNamespace(cuda=cuda))
        self.copies = CopyStream(torch.device("cuda"))
        self.before: dict[str, set[str]] = {}

    def launch(self, step: int, *, copies: bool, waits: bool) -> Any:
        """-> the step's end, which a step that `waits` for late rows has when they are drawn."""
        self.copies.join()
        self._run(f"swap {step}")
        if copies:
            self.copies.begin(lambda: self._run(f"copy {step}"))
        self._run(f"forward {step}")
        if not waits:
            return self.copies.end()
        self.copies.issue()
        assert not copies or f"copy {step}" in self.before, "late rows may wait for long"
        self._run(f"draw {step}")
        return self.copies.end()

    def _run(self, name: str) -> None:
        self.before[name] = self.current.run(name)

    @contextmanager
    def _use(self, stream: NotedStream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.main


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_copies_are_beside_their_step_and_between_the_others(steps: list[tuple[bool, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        streams = TwoStreams(patch)
        for step, (copies, waits) in enumerate(steps):
            end = streams.launch(step, copies=copies, waits=waits)
            own = {f"swap {step}", f"forward {step}", *[f"copy {step}"] * copies, *[f"draw {step}"] * waits}
            earlier = streams.before[f"swap {step}"]
            assert end.done >= own | earlier, "whatever the step reads or writes is over at its end"
            if copies:
                assert streams.before[f"copy {step}"] >= {f"swap {step}", *earlier}
                assert f"forward {step}" not in streams.before[f"copy {step}"]
                assert f"copy {step}" not in streams.before[f"forward {step}"]
            if step and steps[step - 1][0]:
                assert f"copy {step - 1}" in earlier


def test_steps_without_copies_cost_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = TwoStreams(monkeypatch)
    streams.launch(0, copies=True, waits=False)
    streams.launch(1, copies=False, waits=False)
    calls, others = streams.main.num_calls, streams.copies._stream
    assert isinstance(others, NotedStream)
    before = others.num_calls
    streams.launch(2, copies=False, waits=False)
    assert (streams.main.num_calls - calls, others.num_calls - before) == (1, 0)


@pytest.mark.parametrize("runs_early", [False, True])
def test_a_cpu_copies_once_in_the_launch(runs_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyStream, "runs_early", runs_early)
    copies, order = CopyStream(torch.device("cpu")), list[str]()
    copies.join()
    copies.begin(lambda: order.append("copy"))
    order.append("forward")
    assert copies.end() is None
    copies.issue()
    assert order == (["copy", "forward"] if runs_early else ["forward", "copy"])
