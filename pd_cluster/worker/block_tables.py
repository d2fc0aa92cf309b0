"""The block tables of the worker's rows, one for each KV group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.worker.state_rows import StateRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd_cluster.scheduling.batch import NewBlocks
    from pd_kernels.values import Ints


class BlockTables:
    """Block ids by group, row, and block of the sequence. Entries that no NewBlocks named are undefined."""

    def __init__(self, num_rows: int, max_len: int, block_sizes: Sequence[int], *, has_states: bool = False) -> None:
        """`max_len`: tokens of a sequence. `block_sizes`: tokens of a block, by group, without that of states.

        `has_states`: the group after these is STATE.
        """
        self.states = StateRows(num_rows, len(block_sizes)) if has_states else None
        self.groups = range(len(block_sizes))
        self.arrays = [np.zeros((num_rows, table_width(max_len, size)), np.int32) for size in block_sizes]
        self._sizes = block_sizes

    @property
    def widths(self) -> tuple[int, ...]:
        """The most blocks of a row, by group."""
        return tuple(array.shape[1] for array in self.arrays)

    def start(self, row: int, tables: tuple[NewBlocks, ...]) -> None:
        """Begin a row. `tables`: by group, that of states among them."""
        self.write(row, tables[: len(self.arrays)])
        if self.states is not None:
            self.states.start(row, tables)

    def write(self, row: int, new_blocks: tuple[NewBlocks, ...]) -> None:
        for new in new_blocks:
            self.arrays[new.group][row, new.first_block : new.first_block + len(new.block_ids)] = new.block_ids

    def copy(self, to: Ints, of: Ints) -> None:
        """Set the rows `to` to the rows `of`, as they were before."""
        for array in self.arrays:
            array[to] = array[of]
        if self.states is not None:
            self.states.copy(to, of)

    def columns(self, group: int, rows: Ints, num_tokens: int, *, rounded: bool = False) -> npt.NDArray[np.int32]:
        """The blocks of the first `num_tokens` tokens of rows; `rounded`: as many as `table_width` says."""
        size = self._sizes[group]
        return self.arrays[group][rows, : table_width(num_tokens, size) if rounded else -(-num_tokens // size)]

    def slots(self, group: int, rows: Ints, positions: Ints) -> Ints:
        """Where tokens lie in the group's tensor."""
        size = self._sizes[group]
        places, offsets = np.divmod(positions, size)
        slots: Ints = np.multiply(self.arrays[group][rows, places], size, dtype=np.int64)
        slots += offsets
        return slots

    def fresh(self, group: int, rows: Ints, starts: Ints, ends: Ints) -> Ints | None:
        """The blocks that tokens [starts, ends) of rows begin and do not fill; None: there are none."""
        size = self._sizes[group]
        last = (ends - 1) // size
        fresh = np.flatnonzero((last * size >= starts) & (ends % size != 0))
        return self.arrays[group][rows[fresh], last[fresh]].astype(np.int64) if len(fresh) else None


def table_width(num_tokens: int, block_size: int) -> int:
    """Columns of a block table for this many tokens.

    The number is rounded up, because some kernels are compiled for each divisor of a stride.
    """
    return -(-num_tokens // (16 * block_size)) * 16
