"""The engine's side of the worker: an executor in states, of which the last one launches one batch per step.

    state       owns                                            method      next state
    Described   description and layout of the model, kernels    load        Loaded
    Loaded      the weights, too                                allocate    Cached
                                                                unload      Described
    Cached      the cache, zeroed                               warm_up     Executor, which is ready to serve
                                                                free        Loaded
    Executor    the rows of sequences, the captured steps       sleep       Loaded

Each state is an object of its own with complete attributes. One state is present at a time, and owns all that was
acquired; to use a state that was left raises StateLeft. A transition that fails leaves its state present. On one device
it may be tried again, also in the handler of the failure, which holds no memory; over several ranks the state can only
be closed. After a way back the memory is free, unless the caller still holds some of it: a connector, a
CacheDescription, a step. The weights are unchanged by `sleep`; what was measured is measured again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeVar

from pd_cluster.errors import StartupError
from pd_cluster.worker.kv_cache import blocks_in
from pd_connectors.base import Closes
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pd_cluster.config import CacheConfig, NodeConfig
    from pd_cluster.models.spec import ModelSpec
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import Batch, StepResult
    from pd_cluster.scheduling.step_model import StepWork
    from pd_connectors.base import CacheDescription, ConnectorContext
    from pd_connectors.protocol.layout import BlockLayout
    from pd_connectors.rank_port import RankPort

logger = logging.getLogger(__name__)

Ready_co = TypeVar("Ready_co", bound="Executor", covariant=True)  # the last state
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


class DescribedState(Closes, Protocol[Ready_co]):
    """The model is described, and all is chosen that needs no weights."""

    def load(self) -> LoadedState[Ready_co]:
        """Read the weights from the model's files. Raises StartupError."""


class LoadedState(Closes, Protocol[Ready_co]):
    """The weights are in place."""

    layout: BlockLayout  # of one rank's blocks

    def free_kv_bytes(self) -> int:
        """Bytes that a rank can give to its cache: the minimum over the ranks."""

    def allocate(self, slabs: KvSlabs, num_host_blocks: int) -> CachedState[Ready_co]:
        """Allocate every rank's cache. Raises StartupError."""

    def unload(self) -> DescribedState[Ready_co]:
        """Give the memory of the weights back."""


class CachedState(Closes, Protocol[Ready_co]):
    """The cache exists, zeroed."""

    def warm_up(self) -> Ready_co:
        """Run the first steps, capture graphs, measure steps. The cache is zero again. Raises StartupError.

        Ranks stop capturing when their own memory runs out; only sizes that all of them have may be replayed.
        """

    def free(self) -> LoadedState[Ready_co]:
        """Give the memory of the cache back."""


class Executor(Closes, Protocol):
    """Runs the model on its ranks, each of which is ready. Not thread-safe.

    The executor on rank 0 chooses the captured size that serves a step (`GraphSizes.choose`), and gives it to every
    rank with the batch. If each rank chose, ranks could pad a step to different sizes, and their collectives would
    hang.
    """

    config: NodeConfig  # the settings, with the decided capacity and the measured limits
    model: ModelDescription  # its sequences are no longer than the cache
    layout: BlockLayout  # of one rank's blocks
    slabs: KvSlabs  # the memory of the cache
    num_host_blocks: int  # of each group, in the host memory for preempted sequences
    block_size: int  # tokens per block
    cache: CacheDescription  # of the cache in this process, which is rank 0's, for a connector

    def sleep(self) -> LoadedState[Executor]:
        """Give back the memory of the cache and the graphs, and forget all sequences. No step may be under way.

        The connector must be closed before, and it needs `connect` again afterwards.
        """

    def connect(self, name: str, context: ConnectorContext) -> tuple[RankPort, ...]:
        """Start what the connector `name` needs on the further ranks. -> the ways to them, by rank.

        Call it before the first launch, and before the connector is made. Raises RankLost.
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


def run_phases(described: DescribedState[Ready_co], config: CacheConfig, progress: Callable[[str], None]) -> Ready_co:
    """Take an executor from its first state to the last one. `progress` receives a line per phase.

    When a phase fails, the state before it is closed. Raises StartupError.
    """
    state: Closes = described
    try:
        state = loaded = described.load()
        slabs = _divide_memory(loaded, config)
        progress(_describe(slabs, loaded.layout))
        state = cached = loaded.allocate(slabs, blocks_in(config.swap_gb * 1e9, loaded.layout))
        progress("warm-up")
        return cached.warm_up()
    except BaseException:
        try:
            state.close()
        except RuntimeError:  # a device that has failed fails again; the first failure is the one to report
            logger.warning("the executor could not be closed after a failed start", exc_info=True)
        raise


def _divide_memory(loaded: LoadedState[Ready_co], config: CacheConfig) -> KvSlabs:
    """The slabs for the configured number of blocks, or those that fit. Raises StartupError if they are too few."""
    layout = loaded.layout
    if config.num_blocks:
        slabs = KvSlabs.of_blocks(layout, config.num_blocks)
    else:
        slabs = KvSlabs.in_bytes(layout, loaded.free_kv_bytes())
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
