"""A module of the checkpoint as a part of a Linear. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster.models.shard import Cut

if TYPE_CHECKING:
    from pd_cluster.models.shard import RowRuns


@dataclass(frozen=True, slots=True)
class LinearPart:
    """The rows of one module in the merged weight of a Linear, of one rank.

    They are in the order of loading: `Linear.reorder` may put the rows of the whole Linear in another one afterwards.
    """

    kind: str  # of the Linear
    index: int  # of the Linear among those of its kind
    start: int  # the first row of the module in the Linear
    rows: Cut | RowRuns  # of the module, those that this rank has
    inputs: Cut  # with a part of them the rank computes a partial sum

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the module in the checkpoint."""
        return self.rows.total, self.inputs.total

    @property
    def runs(self) -> tuple[range, ...]:
        """The module's rows that this rank has, as runs, in the order of the Linear."""
        return (self.rows.part,) if isinstance(self.rows, Cut) else self.rows.parts
