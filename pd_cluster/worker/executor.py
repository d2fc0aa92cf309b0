"""The engine's side of the worker: an executor starts in phases, then launches one batch per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pd_cluster.models.spec import ModelSpec
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import Batch, StepResult
    from pd_connectors.base import CacheDescription
    from pd_connectors.protocol.layout import BlockLayout
    from pd_kernels.values import StepSize


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the rest of the node knows about the model."""

    spec: ModelSpec
    eos_token_ids: frozenset[int]
    max_model_len: int  # prompt + output, in tokens
    dtype: str
    device: str
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size


class Pending(Protocol):
    """A launched step. A later step may be launched before this one's result is read."""

    @property
    def is_over(self) -> bool:
        """True once every rank's work of the step has ended, so that `result` does not wait."""

    def result(self) -> StepResult:
        """Wait until every rank's work of the step has ended, then read the sampled tokens.

        Call once per step, in the order of launches, also when nothing was sampled: after it the blocks that the step
        wrote may be read by others. One rank's end is not enough, because another rank's blocks may be unwritten.
        """


class Executor(Protocol):
    """The model's ranks behind one door. Not thread-safe.

    The phases run once, in this order; `run_phases` drives them:

        load            the weights are in place; `model` and `layout` are known
        free_kv_bytes   left out when the number of blocks is configured
        allocate        the cache exists, zeroed
        warm_up         kernels are compiled, steps are captured, the cache is zero again
        launch          any number of times
        close           at any point, also after a phase that failed

    A phase raises StartupError when it fails for a reason that the operator can change. Construction acquires nothing.

    Which captured size serves a step is decided once, by the executor on rank 0 (`GraphSizes.choose`), and given to
    every rank with the batch. Ranks that chose for themselves could pad to different sizes, and their collectives
    would hang.
    """

    model: ModelDescription
    layout: BlockLayout  # of one rank's blocks

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host memory for preempted sequences."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    def load(self) -> None:
        """Read the model's files and place its weights. Raises StartupError."""

    def free_kv_bytes(self) -> int:
        """Bytes that a rank can give to its cache: the minimum over the ranks."""

    def allocate(self, num_blocks: int, num_host_blocks: int) -> tuple[CacheDescription, ...]:
        """Allocate every rank's cache. -> their descriptions, by rank. Raises StartupError."""

    def warm_up(self) -> tuple[StepSize, ...]:
        """Run the first steps and capture graphs. -> the sizes that every rank has captured. Raises StartupError.

        Ranks stop capturing when their own memory runs out; only sizes that all of them have may be replayed.
        """

    def check(self, sampling: SamplingParams) -> None:
        """Raises InvalidRequest when a logits stage from outside cannot serve a request of these parameters."""

    def launch(self, batch: Batch) -> Pending:
        """Apply the batch and start its work. Loads and publishes are the connector's part.

        At most two steps may be under way: a step with rows of a late logits stage is drawn when the result of the step
        before it is read.
        """

    def close(self) -> None:
        """Wait for the devices and release what the phases acquired. Idempotent.

        The cache's memory lives until the last reference to it (a transport's, for instance) is gone.
        """
