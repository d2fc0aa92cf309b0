"""The part of a model that is built: the rank, and its sums with the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster.models.shard import WHOLE, Shard

if TYPE_CHECKING:
    from pd_cluster.models.reduce import Reduce


@dataclass(frozen=True, slots=True)
class ModelShare:
    """Which rank a model is built for. The default: one rank, which computes everything without sums over ranks."""

    shard: Shard = WHOLE
    reduce: Reduce | None = None  # None if and only if there is one rank

    def __post_init__(self) -> None:
        assert (self.reduce is None) == (self.shard.size == 1)
