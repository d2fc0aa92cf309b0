"""The engine's side of the worker: what it knows of the model, and how it launches steps and reads results."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Protocol

from pd_connectors.base import Closes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pd_cluster.config import NodeConfig
    from pd_cluster.drafting.forced import ForcedTokens
    from pd_cluster.models.spec import ModelSpec
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import Batch, StepResult
    from pd_cluster.scheduling.step_model import StepWork
    from pd_connectors.base import CacheDescription, ConnectorContext
    from pd_connectors.protocol.layout import BlockLayout
    from pd_connectors.protocol.slabs import KvSlabs
    from pd_connectors.rank_port import RankPort


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
    step_times: tuple[tuple[StepWork, float], ...] = ()  # works and seconds of steps that were measured at start

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
    block_size: int  # tokens per block
    cache: CacheDescription  # of the cache in this process, which is rank 0's, for a connector
    host_gb_s: float  # of rank 0's link to host memory, each way, with no other rank copying; 0: not measured

    def read_adapter(self, digest: str, path: str, told: Callable[[str, str, int], None]) -> None:
        """Let each rank read an adapter from its files into host memory, on a thread. Only with --lora-slots.

        `told`, the same in each call, is called once for each rank, on any thread: with the digest, and an error, or ""
        and the bytes that the rank holds. After an error of one the others may have it: drop it.
        """

    def drop_adapter(self, digest: str) -> None:
        """Forget an adapter in the host memory of all ranks, after the steps that were launched."""

    @property
    def num_host_blocks(self) -> int:
        """Units of blocks in host memory (`host_unit`) that are ready on every rank: those with ids below it.

        At first those for preempted sequences. It grows from `connect` on, and what the steps up to a moment have told
        of it is known then.
        """

    @property
    def most_host_blocks(self) -> int:
        """What `num_host_blocks` will be, if the machine has the memory."""

    def host_block(self, group: int, block: int) -> memoryview:
        """The bytes of this rank's host block, below `num_host_blocks`. No copy of a step may be under way with it."""

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

    def take_forced(self) -> Sequence[ForcedTokens]:
        """What grammars force, as far as it was found since the last call. Nothing is sought before the first one."""

    def start_profile(self) -> None:
        """Record the work of host and devices, until `stop_profile` or `close`. Ignored while it records."""

    def stop_profile(self, directory: str) -> None:
        """Write the record to a new file of `directory`, which may take a minute. Ignored when there is none."""
