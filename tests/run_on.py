"""An executor of which a step gives a sequence several tokens: it goes on computing after the one that was drawn.

So all that is behind the worker gets runs of a real model, with real KV, and nothing has to propose tokens.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from pd_cluster.scheduling.batch import Batch, SequenceChunk, StepResult

if TYPE_CHECKING:
    from pd_cluster.worker.device_executor import DeviceExecutor
    from pd_cluster.worker.executor import Pending
    from pd_connectors.protocol.messages import SampledToken


class RunsOn:
    """Wraps a DeviceExecutor, for an engine that waits for each step (depth 1).

    longest: of a run. It is cut short where the block of the last token that the engine knows of is full.
    """

    def __init__(self, executor: DeviceExecutor, longest: int) -> None:
        self._executor = executor
        self._longest = longest
        self._num_prompt: dict[int, int] = {}
        self.num_runs = 0  # of more than one token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, batch: Batch, deadline_s: float = inf) -> _Running:
        for start in batch.starts:
            self._num_prompt[start.seq_id] = start.num_prompt_tokens
        return _Running(self, self._executor.launch(batch, deadline_s), batch)

    def run_on(self, batch: Batch, result: StepResult) -> StepResult:
        """After each decode, compute the tokens that may follow it in its block."""
        runs = dict(result.samples)
        going = [chunk for chunk in batch.chunks if chunk.num_samples == 1 and self._is_decode(chunk, result)]
        for number in range(1, self._longest):
            going = [
                SequenceChunk(chunk.seq_id, chunk.start + 1, 1, num_samples=1)
                for chunk in going
                if (chunk.start + 1) % self._executor.block_size
                # How long a run is depends on its place, so that runs of all lengths are there
                and number <= (chunk.start + chunk.seq_id) % self._longest
            ]
            if not going:
                break
            more = self._executor.launch(Batch(batch.step, chunks=tuple(going)), inf).result()
            assert not more.failures
            going = [chunk for chunk in going if chunk.seq_id in more.samples]
            for chunk in going:
                runs[chunk.seq_id] += more.samples[chunk.seq_id]
        self.num_runs += sum(len(run) > 1 for run in runs.values())
        return _with_runs(result, runs)

    def _is_decode(self, chunk: SequenceChunk, result: StepResult) -> bool:
        is_drawn = chunk.seq_id in result.samples and chunk.seq_id not in result.failures
        return is_drawn and chunk.is_decode and chunk.start >= self._num_prompt[chunk.seq_id]


class _Running:
    """A step, the runs of which are computed when its result is asked for."""

    def __init__(self, executor: RunsOn, pending: Pending, batch: Batch) -> None:
        self._executor, self._pending, self._batch = executor, pending, batch

    @property
    def is_over(self) -> bool:
        return self._pending.is_over

    @property
    def absent(self) -> frozenset[int]:
        return self._pending.absent

    def result(self) -> StepResult:
        return self._executor.run_on(self._batch, self._pending.result())


def _with_runs(result: StepResult, runs: dict[int, tuple[SampledToken, ...]]) -> StepResult:
    return StepResult(result.step, runs, result.first_samples, result.failures, result.absent, result.prompts)
