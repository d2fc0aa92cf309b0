"""The engine core in this process, without message queues: the step loop, the worker and the kernels only."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pd_cluster.engine.core import EngineCore
from pd_cluster.engine.process import SWITCH_INTERVAL_S, rare_garbage_collection
from pd_cluster.protocol.messages import AddRequest, EngineStats, FromEngine, RequestFailed, ToEngine, TokensOut
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes
from pd_cluster.worker.device_executor import DeviceDescribed, DeviceExecutor, run_phases
from pd_cluster.worker.ranks import Ranks
from pd_connectors.base import ConnectorContext
from pd_connectors.protocol.cache_space import cache_space
from pd_connectors.registry import create_connector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd_cluster.config import NodeConfig
    from pd_cluster.errors import PdError
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.worker.executor import Executor


@dataclass(slots=True)
class DirectMailbox:
    """A Mailbox that passes messages in memory, for one thread."""

    inbox: list[ToEngine] = field(default_factory=list)
    outbox: list[FromEngine] = field(default_factory=list)
    flushed_s: float = 0.0  # when the messages in `outbox` were sent
    counters: dict[str, float] = field(default_factory=dict)  # as sent last, also if a client has dropped the message

    def wake(self) -> None:
        """There is no other thread to wake."""

    def wait(self, timeout_s: float) -> bool:
        """Sleep: no other thread sends a message."""
        time.sleep(timeout_s)
        return False

    def receive(self) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        if isinstance(message, EngineStats):
            self.counters = message.counters
        self.outbox.append(message)

    def flush(self) -> None:
        """Note the time. The core learns from a step after it, when a client would have the tokens."""
        if self.outbox:
            self.flushed_s = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Generated:
    """The result of a call."""

    seconds: float  # until the last token
    first_token_s: tuple[float, ...]  # of each prompt
    last_token_s: tuple[float, ...]  # the same
    tokens: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


class OfflineEngine:
    """Generates for lists of prompts, which are all sent at once."""

    def __init__(self, config: NodeConfig, progress: Callable[[str], None]) -> None:
        """Raises StartupError."""
        self._cleanup = ExitStack()
        self.executor = self._make_executor(config, progress)
        self._cleanup.callback(self.executor.close)
        context = offline_context(self.executor)
        connector = create_connector("none", replace(context, rank_ports=self.executor.connect("none", context)))
        connector.register_kv_cache(self.executor.cache)
        self.mailbox = DirectMailbox()
        self.core = EngineCore(self.executor.config, self.executor, connector, self.mailbox)
        self._num_calls = 0
        # As in the engine's own process
        self._cleanup.enter_context(rare_garbage_collection())
        self._cleanup.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def generate(
        self,
        prompts: list[list[int]],
        samplings: list[SamplingParams],
        predictions: Sequence[tuple[int, ...]] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> Generated:
        """`predictions`: of the answers, by their clients; `adapters`: their digests. None: there are none.

        Raises RuntimeError when a request is refused.
        """
        self._num_calls += 1
        ids = {f"{self._num_calls}-{index}": index for index in range(len(prompts))}
        tokens: list[list[int]] = [[] for _ in prompts]
        firsts, lasts = [0.0] * len(prompts), [0.0] * len(prompts)
        num_open = len(prompts)
        start_s = end_s = time.perf_counter()
        nothing = [""] * len(prompts)
        for request_id, prompt, sampling, prediction, adapter in zip(
            ids, prompts, samplings, predictions or [()] * len(prompts), adapters or nothing, strict=True
        ):
            salt = cache_space(adapter, "")
            added = AddRequest(request_id, prompt, sampling, prediction=prediction, adapter=adapter, salt=salt)
            self.mailbox.inbox.append(added)
        while (has_turned := self.core.turn()) or num_open:
            if not has_turned:
                self.mailbox.wait(0.0001)  # threads compile a grammar
            messages, self.mailbox.outbox = self.mailbox.outbox, []
            for message in messages:
                if isinstance(message, RequestFailed):
                    raise RuntimeError(f"{message.error}: {message.message}")
                if isinstance(message, TokensOut):
                    index = ids[message.request_id]
                    end_s = self.mailbox.flushed_s
                    lasts[index] = end_s - start_s
                    firsts[index] = firsts[index] or lasts[index]
                    for part in message.sequences:
                        tokens[index] += [token.token_id for token in part.tokens]
                    num_open -= message.finished
        return Generated(end_s - start_s, tuple(firsts), tuple(lasts), tokens)

    def counters(self) -> dict[str, float]:
        """The engine's totals since its start. Call it between two calls."""
        self.core.settle()  # which sends nothing if nothing is new
        self.mailbox.outbox.clear()
        return dict(self.mailbox.counters)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Meanwhile no step is replayed from a graph."""
        executor = self.executor
        sizes, executor._graph_sizes = executor._graph_sizes, GraphSizes(())
        try:
            yield
        finally:
            executor._graph_sizes = sizes

    @contextmanager
    def without_drafts(self) -> Iterator[None]:
        """Meanwhile requests are served as with `--speculation none`. There must be none at its begin and its end."""
        scheduler = self.core._scheduler
        assert scheduler.idle
        owners = (scheduler, scheduler._arrivals, scheduler._planner, scheduler._life, scheduler._effects)
        drafting = scheduler._drafting
        for owner in owners:
            owner._drafting = None
        try:
            yield
        finally:
            for owner in owners:
                owner._drafting = drafting

    def close(self) -> None:
        """Idempotent."""
        self._cleanup.close()

    def _make_executor(self, config: NodeConfig, progress: Callable[[str], None]) -> DeviceExecutor:
        if config.model.tp == 1:
            return DeviceExecutor.started(config, progress)
        directory = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pd-bench-"))
        ranks = Ranks(config, f"ipc://{directory}/rank", _end_after_loss)
        return run_phases(DeviceDescribed.over(ranks, progress), config.cache, progress)


def _end_after_loss(error: PdError) -> None:
    """End the process, because a collective may never return when a rank is gone."""
    sys.stderr.write(f"{error}\n")
    os._exit(1)


def offline_context(executor: Executor) -> ConnectorContext:
    """For a connector that transfers nothing."""
    return ConnectorContext(
        engine_id="bench", epoch=1, fingerprint=executor.model.fingerprint, layout=executor.cache.layout,
        cluster_key=b"", host="127.0.0.1", port=0,
    )  # fmt: skip
