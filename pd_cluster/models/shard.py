"""The part of the model that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from pd_cluster.errors import StartupError


@dataclass(frozen=True, slots=True)
class Cut:
    """A run of the rows or columns of a checkpoint's tensor."""

    total: int
    part: range

    @classmethod
    def of(cls, size: int | Cut) -> Cut:
        """A cut as it is; a number of rows or columns as the run of all."""
        return size if isinstance(size, Cut) else cls(size, range(size))

    @classmethod
    def of_things(cls, things: range, total: int, size: int) -> Cut:
        """The rows of some of `total` things, which have `size` rows each."""
        return cls(total * size, range(things.start * size, things.stop * size))

    def __len__(self) -> int:
        return len(self.part)

    @property
    def is_part(self) -> bool:
        """Whether rows or columns are left out."""
        return len(self.part) < self.total


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Runs of the rows of a checkpoint's tensor, in the order in which a rank has them."""

    total: int
    parts: tuple[range, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Each run alone."""
        return tuple(Cut(self.total, part) for part in self.parts)

    @classmethod
    def of_things(cls, things: range, total: int, *parts: tuple[int, int, int]) -> RowRuns:
        """Of some of `total` things: for each of `parts` (start, size, distance) the runs of all things, one by one.

        The run of thing i has `size` rows from `start + i * distance` on.
        """
        places = ((start + thing * distance, size) for start, size, distance in parts for thing in things)
        return cls(total, tuple(range(start, start + size) for start, size in places))


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` tensor-parallel ranks. One rank, the default, holds everything."""

    rank: int = 0
    size: int = 1

    def part(self, total: int, what: str) -> range:
        """This rank's part of `total` things, an equal run for every rank.

        Raises StartupError, which names `what`, if the ranks cannot share evenly.
        """
        if total % self.size:
            raise StartupError(f"--tp {self.size}: {total} {what} cannot be split evenly over {self.size} ranks")
        count = total // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def kv_heads(self, total: int) -> range:
        """This rank's KV heads. With more ranks than heads neighbours hold the same one, as in `KVGroup.heads_of`.

        Raises StartupError if the heads cannot be split evenly.
        """
        if max(total, self.size) % min(total, self.size):
            raise StartupError(f"--tp {self.size}: {total} KV heads cannot be split over {self.size} ranks")
        first, count = self.rank * total // self.size, max(1, total // self.size)
        return range(first, first + count)

    def vocabulary(self, total: int) -> range:
        """The token ids of this rank's logits: `ceil(total / size)` on the first ranks, fewer on the last.

        Raises StartupError if a rank would have none.
        """
        count = -(-total // self.size)
        if count * (self.size - 1) >= total:
            raise StartupError(f"--tp {self.size}: {total} tokens of the vocabulary are too few for {self.size} ranks")
        return range(self.rank * count, min(total, (self.rank + 1) * count))

    def cut(self, total: int, what: str, size: int = 1) -> Cut:
        """The rows of this rank's part of `total` things of `size` rows each. Raises StartupError as `part` does."""
        return Cut.of_things(self.part(total, what), total, size)

    def cut_kv_heads(self, total: int, head_dim: int) -> Cut:
        """The rows of this rank's KV heads. Raises StartupError as `kv_heads` does."""
        return Cut.of_things(self.kv_heads(total), total, head_dim)


WHOLE = Shard()
"""The only rank, which holds everything."""
