"""The stream beside a device's main one: a step's copies to and from host memory run on it beside the forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class CopyStream:
    """Orders the work of one step after another. A step without such work costs nothing.

    On a CPU the work runs in the launch: after the forward, or before it.
    """

    runs_early = False  # on a CPU. BlockCopies allow both, and tests take both

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._work: Callable[[], None] | None = None  # of the step that is being launched, not yet issued
        self._begun: torch.cuda.Event | None = None  # what the main stream does before that work
        self._done: torch.cuda.Event | None = None  # of work that the main stream has not waited for

    def join(self) -> None:
        """Let the main stream wait for the work of the step before."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
            self._done = None

    def begin(self, work: Callable[[], None]) -> None:
        """Let `work` follow what the main stream has got so far. It is issued by `issue`, or by the step's end."""
        self._work = work
        if self._stream is not None:
            self._begun = torch.cuda.current_stream().record_event()
        elif self.runs_early:
            self.issue()

    def issue(self) -> None:
        """Issue the step's work, if that was not done. After the forward: a copy of a block takes 10 us of the host."""
        if self._work is None:
            return
        work, self._work = self._work, None
        if self._stream is None or self._begun is None:
            return work()
        self._stream.wait_event(self._begun)
        with torch.cuda.stream(self._stream):
            work()
            self._done = self._stream.record_event()

    def end(self) -> torch.cuda.Event | None:
        """The end of the step on both streams; None: on a CPU the launch is all of it."""
        self.issue()
        if self._stream is None:
            return None
        last = torch.cuda.current_stream()
        if self._done is not None:
            self._stream.wait_stream(last)
            last = self._stream
        retired: torch.cuda.Event = last.record_event()
        return retired
