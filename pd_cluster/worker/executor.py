"""The engine's side of the worker: an executor starts in phases, then launches one batch per step."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Protocol

from pd_cluster.errors import StartupError
from pd_cluster.worker.kv_cache import blocks_in
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pd_cluster.config import CacheConfig
    from pd_cluster.models.spec import ModelSpec
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import Batch, StepResult
    from pd_cluster.scheduling.step_model import StepWork
    from pd_connectors.base import CacheDescription, ConnectorContext
    from pd_connectors.protocol.layout import BlockLayout
    from pd_connectors.rank_port import RankPort
    from pd_kernels.values import StepSize

logger = logging.getLogger(__name__)

MIN_BLOCKS = 2  # the first step copies a block


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The properties of the model that the rest of the node uses."""

    spec: ModelSpec
    eos_token_ids: frozenset[int]
    max_model_len: int  # prompt + output, in tokens
    dtype: str  # of weights
    kv_dtype: str  # of cached keys and values: one of kv_cache.KV_DTYPES
    device: str
    fingerprint: str
    ends: str = ""  # the line of the start about `eos_token_ids`
    measured_keys: int = 0
    step_times: tuple[tuple[StepWork, float], ...] = ()  # works and seconds of steps that were measured at start

    @property
    def keys_per_token(self) -> int:
        """See ModelSpec. On a decode node's GPU it is measured."""
        return self.measured_keys or self.spec.keys_per_token

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size


class Pending(Protocol):
    """A launched step. A later step may be launched before this one's result is read."""

    @property
    def is_over(self) -> bool:
        """True once every rank's work of the step has ended, so that `result` does not wait."""

    @property
    def absent(self) -> frozenset[int]:
        """The sequences without a token in this step, see StepResult. Known from `Executor.draw_late` on."""

    def result(self) -> StepResult:
        """Wait until every rank's work of the step has ended, then read the sampled tokens.

        Call it once per step, in the order of launches, also when nothing was sampled. After the call others may read
        the blocks that the step wrote. The end of one rank's work is not enough, because another rank's blocks may be
        unwritten.
        """


class Executor(Protocol):
    """Runs the model on its ranks. Not thread-safe.

    The phases run once, in this order; `run_phases` drives them:

        load            the weights are in place; `model` and `layout` are known
        free_kv_bytes   not called when the number of blocks is configured
        allocate        the cache exists, zeroed
        warm_up         kernels are compiled, steps are captured, the cache is zero again
        launch          any number of times
        close           at any point, also after a phase that failed

    A phase raises StartupError when it fails for a reason that the operator can change. The constructor acquires
    nothing.

    The executor on rank 0 chooses the captured size that serves a step (`GraphSizes.choose`), and gives it to every
    rank with the batch. If each rank chose, ranks could pad a step to different sizes, and their collectives would
    hang.
    """

    model: ModelDescription
    layout: BlockLayout  # layout of one rank's blocks

    @property
    def slabs(self) -> KvSlabs:
        """The memory of the cache."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks of each group in the host memory for preempted sequences."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    def load(self) -> None:
        """Read the model's files and place its weights. Raises StartupError."""

    def free_kv_bytes(self) -> int:
        """Bytes that a rank can give to its cache: the minimum over the ranks."""

    def allocate(self, slabs: KvSlabs, num_host_blocks: int) -> tuple[CacheDescription, ...]:
        """Allocate every rank's cache. -> descriptions of those in this process: rank 0's. Raises StartupError."""

    def warm_up(self) -> tuple[StepSize, ...]:
        """Run the first steps, capture graphs, measure steps. -> the sizes that every rank has captured.

        Raises StartupError.

        Ranks stop capturing when their own memory runs out; only sizes that all of them have may be replayed.
        """

    def connect(self, name: str, context: ConnectorContext) -> tuple[RankPort, ...]:
        """Start what the connector `name` needs on the further ranks. -> the ways to them, by rank.

        Call it between the phases and the first launch, before the connector is made. Raises RankLost.
        """

    def check(self, sampling: SamplingParams) -> None:
        """Raises InvalidRequest when the worker cannot serve a request with these parameters.

        A grammar is compiled from now on, on another thread: the first step that draws under it needs it.
        """

    def launch(self, batch: Batch, deadline_s: float = inf) -> Pending:
        """Apply the batch and start its work. Loads and publishes are the connector's part.

        `deadline_s`: a rank on which the step has not ended so long after the step before it is lost, and the engine
        ends with RankLost.

        At most two steps may be under way. Rows of a late logits stage are drawn by `draw_late`.
        """

    def draw_late(self) -> float:
        """Draw the rows of the newest step that have a late logits stage, if they wait. -> seconds waited for stages.

        Call it when the result of the step before has been read, and before the next step is planned: these rows need
        the tokens of the step before, and the plan needs to know which of them are absent. Until the call the stages
        have time to work beside the forward pass, so a late call is a good one. The next launch and the step's own
        result draw rows that still wait.
        """

    def ready(self, wanted: Mapping[int, SamplingParams], wake: Callable[[], None]) -> frozenset[int]:
        """Those of the sequences `wanted` that the next step can draw, as far as is known.

        The others wait for a late logits stage. `wake` is called once, on any thread, when that may have changed.
        """

    def start_profile(self) -> None:
        """Record the work of host and devices, until `stop_profile` or `close`. Ignored while it records."""

    def stop_profile(self, directory: str) -> None:
        """Write the record to a new file of `directory`, which may take a minute. Ignored when there is none."""

    def close(self) -> None:
        """Wait for the devices and release what the phases acquired. Idempotent.

        The cache's memory lives until the last reference to it (a transport's, for instance) is gone.
        """


def run_phases(
    executor: Executor, config: CacheConfig, progress: Callable[[str], None]
) -> tuple[CacheDescription, ...]:
    """Take a new executor through its phases. -> the caches, by rank. `progress` receives a line per phase.

    When a phase fails, the executor is closed. Raises StartupError.
    """
    try:
        executor.load()
        slabs = _divide_memory(executor, config)
        progress(_describe(slabs, executor.layout))
        caches = executor.allocate(slabs, blocks_in(config.swap_gb * 1e9, executor.layout))
        progress("warm-up")
        executor.warm_up()
    except BaseException:
        try:
            executor.close()
        except RuntimeError:  # a device that has failed fails again; the first failure is the one to report
            logger.warning("the executor could not be closed after a failed start", exc_info=True)
        raise
    return caches


def _divide_memory(executor: Executor, config: CacheConfig) -> KvSlabs:
    """The slabs for the configured number of blocks, or those that fit. Raises StartupError if they are too few."""
    layout = executor.layout
    if config.num_blocks:
        slabs = KvSlabs.of_blocks(layout, config.num_blocks)
    else:
        slabs = KvSlabs.in_bytes(layout, executor.free_kv_bytes())
    groups = range(len(layout.groups))
    least = 1 if len(groups) == 1 else len(groups) + 1  # a slab for each, and one that moves
    if slabs.num_slabs < least or min(map(slabs.num_blocks, groups)) < MIN_BLOCKS:
        size_mb, count = layout.block_bytes / 1e6, slabs.num_bytes // layout.rank_bytes
        raise StartupError(f"the KV cache has room for {count} blocks of {size_mb:.1f} MB; give it more memory")
    return slabs


def _describe(slabs: KvSlabs, layout: BlockLayout) -> str:
    """The line of the start about the cache."""
    dtype = layout.groups[0].dtype
    if len(layout.groups) == 1:
        return f"cache {slabs.num_blocks(0)} blocks of {layout.block_size} tokens in {dtype}"
    parts = [
        f"{count} blocks of {group.block_size} tokens ({group.kind}{f' {group.window}' if group.window else ''})"
        for group, count in zip(layout.groups, slabs.per_slab, strict=True)
    ]
    size_mb = slabs.slab_bytes / 1e6
    return f"cache {slabs.num_slabs} slabs of {size_mb:.1f} MB in {dtype}, each {' or '.join(parts)}"
