"""The adapters on the device: a slot holds the matrices of one adapter for all products of the model.

A slot is one run of memory, laid out by the adapter's own rank, so that an adapter comes in one copy of what it has.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_kernels.lora import FEW, RANK_STEP, AdapterMatrices, AdapterRows, tile_rows
from pd_kernels.quantized import QuantizedRows, RowsTwice
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pd_cluster.models.linear import Linear, Normed
    from pd_cluster.models.linear_part import LinearPart
    from pd_kernels.backends import Kernels


@dataclass(frozen=True, slots=True)
class LinearAdapters:
    """What adapters add to one Linear."""

    slots: AdapterSlots
    kernels: Kernels
    matrices: AdapterMatrices

    def _plain(self, x: Normed) -> torch.Tensor | HalfNormed:
        """Rows as the adapters read them: those that the weight reads."""
        if isinstance(x, QuantizedRows):
            return x.widened(self.matrices.memory.dtype)
        return x.plain if isinstance(x, RowsTwice) else x

    def run(self, x: Normed, product: Callable[[], torch.Tensor], target: torch.Tensor | None = None) -> torch.Tensor:
        """`product`, and what the adapters of this step's rows give for `x` added to it.

        `target` [T, out]: they are added to this instead, which the product does not touch.
        """
        plain, rows, kernels = self._plain(x), self.slots.rows, self.kernels
        assert rows is not None
        num_rows = len(plain.x if isinstance(plain, HalfNormed) else plain)
        with self.slots.side(num_rows):
            low = kernels.shrink(plain, self.matrices, rows)
            if target is not None:
                kernels.expand(low, target, self.matrices, rows)
        found = product()
        self.slots.join(num_rows)
        if target is None:
            kernels.expand(low, found, self.matrices, rows)
        return found


class AdapterSlots:
    """Memory for adapters beside a model of one rank."""

    def __init__(
        self,
        linears: Mapping[str, Sequence[Linear]],
        parts: Mapping[str, LinearPart],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        """Give each Linear that has some of the `parts` its adapters. `linears`: by kind. Raises StartupError."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.rows: AdapterRows | None = None  # of the step that is launched; None: no row has an adapter
        self.dtype, self.num_slots, self.max_rank = dtype, num_slots, -(-max_rank // RANK_STEP) * RANK_STEP
        self._parts: dict[tuple[str, int], list[LinearPart]] = {}  # by kind and index of the Linear
        for part in parts.values():
            self._parts.setdefault((part.kind, part.index), []).append(part)
        self.size = sum(  # elements of a slot for each rank
            len(own) * len(own[0].inputs) + sum(len(part.rows) for part in own) for own in self._parts.values()
        )
        try:
            self.memory = torch.zeros(num_slots, self.size * self.max_rank, dtype=dtype, device=device)
        except RuntimeError as error:
            raise StartupError(f"--lora-slots {num_slots}: no room on {device} for {self}: {error}") from error
        self.ranks, start = torch.zeros(num_slots, dtype=torch.int32, device=device), 0
        self._linears: dict[tuple[str, int], LinearAdapters] = {}
        for place, own in self._parts.items():
            bounds = (*(part.start for part in own), own[-1].start + len(own[-1].rows))
            matrices = AdapterMatrices(self.memory, self.ranks, self.max_rank, start, len(own[0].inputs), bounds)
            self._linears[place] = LinearAdapters(self, kernels, matrices)
            linears[place[0]][place[1]].take_adapters(self._linears[place])
            start += matrices.size

    def __str__(self) -> str:
        gigabytes = self.num_slots * self.size * self.max_rank * self.dtype.itemsize / 1e9
        return f"{self.num_slots} adapters of rank {self.max_rank}: {gigabytes:.2f} GB"

    def side(self, num_rows: int) -> AbstractContextManager[object]:
        """Work that runs beside what comes next, until `join`; before it where many rows fill the device.

        It waits for all that came before, so the memory that it takes is free again when it takes it next time.
        """
        if self._stream is None or num_rows > FEW:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def join(self, num_rows: int) -> None:
        if self._stream is not None and num_rows <= FEW:
            torch.cuda.current_stream().wait_stream(self._stream)

    def place(self, memory: torch.Tensor, rank: int, part: LinearPart) -> tuple[torch.Tensor, torch.Tensor]:
        """Where A [rank, in] and B [out, rank] of a part are in the memory of one slot with this rank."""
        place = part.kind, part.index
        a, b = self._linears[place].matrices.of(memory, rank)
        return a[self._parts[place].index(part)], b[part.start : part.start + len(part.rows)]

    def fill(self, slot: int, adapter: torch.Tensor) -> None:
        """Copy an adapter of host memory [rank * size] into a slot. The copy may be under way on return."""
        self.memory[slot, : len(adapter)].copy_(adapter, non_blocking=True)
        self.ranks[slot].fill_(len(adapter) // self.size)

    @torch.inference_mode()
    def run_all_kernels(self) -> None:
        """Compile what steps need. The slots must be empty."""
        tiles = torch.tensor([[0, 0, 1]], dtype=torch.int32, device=self.memory.device)
        for num_rows in (1, FEW + 1):
            self.rows = AdapterRows(tiles[0], tiles, tile_rows(num_rows))
            for (_, index), linear in self._linears.items():
                if not index:  # those of a kind have one shape
                    x = self.memory.new_zeros(num_rows, linear.matrices.num_inputs)
                    y = x.new_zeros(num_rows, linear.matrices.bounds[-1])
                    linear.run(x, partial(y.view, -1), y)
        self.rows = None
