"""A rank's part of an adapter's matrices, as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import BadAdapter

if TYPE_CHECKING:
    from pd_cluster.adapters.adapter_bytes import AdapterBytes
    from pd_cluster.adapters.adapter_spec import AdaptedModule
    from pd_cluster.adapters.tensor_table import StoredMatrix

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class PartMatrices:
    """What a rank adds to its part of a Linear: B A x.

    A Linear with a part of the inputs leaves a partial sum, and so does this: both are reduced together.
    """

    a: torch.Tensor  # [rank, the inputs that the rank has]
    b: torch.Tensor  # [the rows that the rank has, in the Linear's order; rank], times the scale


def part_matrices(
    files: AdapterBytes, module: AdaptedModule, dtype: torch.dtype, order: torch.Tensor | None = None
) -> PartMatrices:
    """The matrices of `module` for the rank of its part, in `dtype`. The files' bytes may go afterwards.

    `order`: of the part's rows in the loaded model, see `Decoder.order_of`. All of both is checked, so that each rank
    comes to the same verdict. Raises BadAdapter for a number that is not finite in `dtype`.
    """
    part = module.part
    a = _checked(files, module.a, _read(files, module.a).to(dtype))
    b = _checked(files, module.b, _read(files, module.b).float().mul(module.scale).to(dtype))
    columns = a[:, part.inputs.part.start : part.inputs.part.stop]
    rows = torch.cat([b[run.start : run.stop] for run in part.runs])
    return PartMatrices(columns.clone(), rows if order is None else rows[order])


def _read(files: AdapterBytes, matrix: StoredMatrix) -> torch.Tensor:
    raw = torch.frombuffer(files.weights, dtype=torch.uint8, count=matrix.num_bytes, offset=matrix.start)
    return raw.view(_DTYPES[matrix.dtype]).view(matrix.shape)


def _checked(files: AdapterBytes, matrix: StoredMatrix, values: torch.Tensor) -> torch.Tensor:
    if not bool(values.isfinite().all()):
        raise BadAdapter(f"{files.weights_file}: {matrix.name} has numbers that are not finite in {values.dtype}")
    return values
