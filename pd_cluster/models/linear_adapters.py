"""What the adapters of a step's rows add to a product."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from pd_kernels.lora import FEW
from pd_kernels.quantized import QuantizedRows, RowsTwice
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from pd_kernels.backends import Kernels
    from pd_kernels.lora import AdapterMatrices, AdapterRows

Inputs: TypeAlias = torch.Tensor | QuantizedRows | HalfNormed | RowsTwice


class AdapterStep:
    """The step that is launched."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.rows: AdapterRows | None = None  # None: no row has an adapter

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


@dataclass(frozen=True, slots=True)
class LinearAdapters:
    """What adapters add to one Linear."""

    slots: AdapterStep
    kernels: Kernels
    matrices: AdapterMatrices

    def run(
        self,
        x: Inputs,
        product: Callable[[], torch.Tensor],
        target: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> torch.Tensor:
        """`product`, and what the adapters of this step's rows give for `x` added to it.

        `target` [T, out]: they are added to this instead, which the product does not touch. `is_gated`: the result is
        silu_and_mul of the sum.
        """
        rows, kernels = self.slots.rows, self.kernels
        assert rows is not None
        if isinstance(x, QuantizedRows):  # those that the weight reads
            x = x.widened(self.matrices.memory.dtype)
        x = x.plain if isinstance(x, RowsTwice) else x
        num_rows = len(x.x if isinstance(x, HalfNormed) else x)
        with self.slots.side(num_rows):
            low = kernels.shrink(x, self.matrices, rows)
            if target is not None:
                kernels.expand(low, target, self.matrices, rows, False)
        found = product()
        self.slots.join(num_rows)
        return found if target is not None else kernels.expand(low, found, self.matrices, rows, is_gated)
