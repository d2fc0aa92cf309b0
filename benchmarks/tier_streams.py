"""A client of an engine in this process: sends requests at any moment, and notes when each token came."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import Abort, AddRequest, RequestFailed, TokensOut
from pd_cluster.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.offline import OfflineEngine


class OfflineClient:
    """Turns the engine's step loop while it waits."""

    def __init__(self, engine: OfflineEngine) -> None:
        self._engine = engine
        self.times: dict[str, list[float]] = {}  # of each request's replies, in s of the clock
        self.tokens: dict[str, list[int]] = {}
        self._open: set[str] = set()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def send(self, prompt: list[int], num_tokens: int) -> str:
        """Send a greedy request. -> its id."""
        request_id = f"c{id(self)}-{len(self.times)}"
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self.times[request_id], self.tokens[request_id] = [], []
        self._open.add(request_id)
        self._engine.mailbox.inbox.append(AddRequest(request_id, prompt, sampling))
        return request_id

    def finish(self, ids: Sequence[str]) -> None:
        """Wait until these requests have ended."""
        while not self._open.isdisjoint(ids):
            self._turn()

    def run_tokens(self, ids: Sequence[str], num_tokens: int) -> None:
        """Wait until each of the requests has so many tokens more, or has ended."""
        wanted = {request: len(self.tokens[request]) + num_tokens for request in ids}
        self.run_while(lambda: any(len(self.tokens[one]) < wanted[one] for one in self._open.intersection(ids)))

    def run_while(self, holds: Callable[[], bool]) -> None:
        while holds():
            self._turn()

    def gaps_of(self, ids: Sequence[str], work: Callable[[], None]) -> dict[str, float]:
        """Milliseconds between two replies of a stream during `work`: the median, p99 and the longest, if one came."""
        begins = {request: len(self.times[request]) - 1 for request in ids}
        work()
        gaps = sorted(
            (later - earlier) * 1e3
            for request in ids
            for earlier, later in pairwise(self.times[request][begins[request] :])
        )
        if not gaps:
            return {}
        return {"gap_p50_ms": gaps[len(gaps) // 2], "gap_p99_ms": gaps[len(gaps) * 99 // 100], "gap_max_ms": gaps[-1]}

    def end(self, ids: Sequence[str]) -> None:
        """Abort the requests, and let what runs end."""
        self._engine.mailbox.inbox += [Abort(request) for request in ids]
        self._open.difference_update(ids)
        while self._turn():
            pass

    def _turn(self) -> bool:
        has_turned = self._engine.core.turn()
        if not has_turned:
            self._engine.mailbox.wait(0.0001)
        messages, self._engine.mailbox.outbox = self._engine.mailbox.outbox, []
        for message in messages:
            if isinstance(message, RequestFailed):
                raise RuntimeError(f"{message.error}: {message.message}")
            if isinstance(message, TokensOut) and message.request_id in self.times:
                self.times[message.request_id].append(time.perf_counter())
                for part in message.sequences:
                    self.tokens[message.request_id] += [token.token_id for token in part.tokens]
                if message.finished:
                    self._open.discard(message.request_id)
        return has_turned
