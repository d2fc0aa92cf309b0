"""What rank 0 of a tensor-parallel engine and its other ranks say to each other (MessagePack, one struct per kind).

rank 0 -> rank r, in one order    PhaseFrame, StepFrame, DrawLate, AdapterFrame, PortMessage, CloseFrame
rank r -> rank 0, answers         PhaseDone, StepRetired: the step loop reads them
rank r -> rank 0, news            Heartbeat, AdapterRead, PortMessage, RankFailed: a thread that watches reads them
"""

from __future__ import annotations

from typing import Any

import msgspec

from pd_cluster.config import NodeConfig
from pd_cluster.errors import PdError
from pd_cluster.scheduling.batch import Batch, BeamStep, BlockCopies, SequenceChunk, SequenceStart
from pd_kernels.values import StepSize


class RankLost(PdError):
    """A rank has ended, is silent, has not ended a step in time, or has drawn other tokens. The engine ends."""


class RankStart(msgspec.Struct, frozen=True):
    """The first line on the standard input of a rank's process, as JSON."""

    config: NodeConfig
    rank: int
    address: str  # prefix of the ipc sockets
    store_port: int  # of torch.distributed's store on 127.0.0.1


class PhaseFrame(msgspec.Struct, frozen=True, tag=True):
    """Run a phase of the executor (`RankProcess` lists them), then answer with PhaseDone."""

    name: str
    arguments: tuple[Any, ...] = ()


class StepFrame(msgspec.Struct, frozen=True, tag=True):
    """Launch a step.

    `changed`, `late`: the sequences among `starts` that need rank 0's own draw, at launch or by a DrawLate.
    """

    step: int
    starts: tuple[SequenceStart, ...]
    chunks: tuple[SequenceChunk, ...]
    departures: tuple[int, ...]
    copies: BlockCopies
    graph: StepSize | None  # the captured size to replay
    changed: tuple[int, ...]
    late: tuple[int, ...]
    beam_steps: tuple[BeamStep, ...]
    adapters: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, batch: Batch, graph: StepSize | None, changed: tuple[int, ...], late: tuple[int, ...]) -> StepFrame:
        rows = (batch.starts, batch.chunks, batch.departures, batch.copies)
        return cls(batch.step, *rows, graph, changed, late, batch.beam_steps, batch.adapters)

    @property
    def batch(self) -> Batch:
        """The step, without what only the engine's connector does."""
        rows = (self.starts, self.chunks, self.departures, self.copies)
        return Batch(self.step, *rows, adapters=self.adapters, beam_steps=self.beam_steps)


class DrawLate(msgspec.Struct, frozen=True, tag=True):
    """Draw the late rows of the newest step, except those of the sequences `absent`."""

    absent: tuple[int, ...]


class AdapterFrame(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter on a thread, then answer with AdapterRead. Without a path: drop it from host memory."""

    digest: str
    path: str = ""


class CloseFrame(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


class PortMessage(msgspec.Struct, frozen=True, tag=True):
    """A message between the connectors' parts on two ranks (`pd_connectors.rank_port`). `rank`: the further rank."""

    rank: int
    message: bytes


class PhaseDone(msgspec.Struct, frozen=True, tag=True):
    """The result of a phase on one rank."""

    rank: int
    result: Any = None


class StepRetired(msgspec.Struct, frozen=True, tag=True):
    """The rank's own work of its oldest step has ended. `digest`: of the sampled ids (`PendingStep.digest`)."""

    rank: int
    digest: int
    num_host_blocks: int = 0  # that are ready on it


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent every HEARTBEAT_S by a thread of its own, also when the rank idles or waits in a collective."""

    rank: int
    phase: str
    launched: int  # steps, since the process began
    retired: int


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    """The rank has read an adapter: so many bytes, or none because of an error."""

    rank: int
    digest: str
    error: str
    num_bytes: int


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank cannot go on and ends. `kind`: the name of a class of `pd_cluster.errors`."""

    rank: int
    kind: str
    message: str


ToRank = PhaseFrame | StepFrame | DrawLate | AdapterFrame | PortMessage | CloseFrame
RankAnswer = PhaseDone | StepRetired
RankNews = Heartbeat | AdapterRead | PortMessage | RankFailed

HEARTBEAT_S = 0.5
