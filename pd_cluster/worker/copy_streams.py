"""The streams beside a device's main one: a step's copies to and from host memory run on them beside the forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class CopyStreams:
    """Orders the work of one step after another. A step without such work costs nothing.

    There are two, because a link carries both directions at once. When a prompt of 8,192 tokens loaded after as many
    saves, it had its first token after 51 ms (8B, one H200), of which the loads were 20. On a CPU the work runs in the
    launch: after the forward, or before it.
    """

    runs_early = False  # on a CPU. BlockCopies allow both, and tests take both

    def __init__(self, device: torch.device) -> None:
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if device.type == "cuda":
            self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self._work: tuple[Callable[[], None], ...] = ()  # of the step that is being launched, not yet issued
        self._begun: torch.cuda.Event | None = None  # what the main stream does before that work
        self._done: list[torch.cuda.Event] = []  # of work that the main stream has not waited for

    def join(self) -> None:
        """Let the main stream wait for the work of the step before."""
        for done in self._done:
            torch.cuda.current_stream().wait_event(done)
        self._done.clear()

    def begin(self, *work: Callable[[], None]) -> None:
        """Let up to two works follow what the main stream has got so far, in no order between them.

        They are issued by `issue`, or by the step's end.
        """
        self._work = work
        if self._streams:
            self._begun = torch.cuda.current_stream().record_event()
        elif self.runs_early:
            self.issue()

    def issue(self) -> None:
        """Issue the step's work, if that was not done. After the forward: a copy of a block takes 10 us of the host."""
        work, self._work = self._work, ()
        if not self._streams or self._begun is None:
            for one in work:
                one()
            return
        for stream, one in zip(self._streams, work, strict=False):
            stream.wait_event(self._begun)
            with torch.cuda.stream(stream):
                one()
                self._done.append(stream.record_event())

    def end(self) -> torch.cuda.Event | None:
        """The end of the step on all streams; None: on a CPU the launch is all of it."""
        self.issue()
        if not self._streams:
            return None
        last = torch.cuda.current_stream()
        if self._done:
            own = self._streams[0]
            own.wait_stream(last)
            for done in self._done:
                own.wait_event(done)
            last = own
        retired: torch.cuda.Event = last.record_event()
        return retired
