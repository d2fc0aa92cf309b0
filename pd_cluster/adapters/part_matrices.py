"""Puts a rank's part of an adapter's matrices where a slot has them.

It runs on a thread beside the step loop. So each call into torch is small enough to be computed on this thread: a team
of threads for each of thousands of small products takes longer than they do, and takes cores from the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import BadAdapter

if TYPE_CHECKING:
    from pd_cluster.adapters.adapter_bytes import AdapterBytes
    from pd_cluster.adapters.adapter_spec import AdaptedModule
    from pd_cluster.adapters.tensor_table import StoredMatrix

PIECE = 1 << 15  # numbers of a call: torch gives more of them to several threads
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_EXPONENTS = {  # of numbers that are not finite all of these bits are set
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F80 << 16),
}


def put_matrices(
    files: AdapterBytes, module: AdaptedModule, a: torch.Tensor, b: torch.Tensor, order: torch.Tensor | None = None
) -> None:
    """Fill `a` [rank, the inputs that the rank has] and `b` [its rows, rank], b with the scale.

    `order`: of the part's rows in the loaded model, see `Decoder.order_of`. A Linear with a part of the inputs leaves a
    partial sum, and so does this: both are reduced together. Raises BadAdapter for a number that is not finite in the
    dtype of `a` and `b`. Other ranks may not have that number: what one of them says counts for all.
    """
    part = module.part
    _put(a, _read(files, module.a)[:, part.inputs.part.start : part.inputs.part.stop], 1.0)
    rows = [_read(files, module.b)[run.start : run.stop] for run in part.runs]
    whole = rows[0] if len(rows) == 1 else torch.cat(rows)
    _put(b, whole if order is None else whole[order], module.scale)
    for matrix, values in ((module.a, a), (module.b, b)):
        kind, exponent = _EXPONENTS[values.dtype]
        bits = values.view(kind).numpy()  # torch's own check makes four passes over the numbers
        if (bits & exponent).max() == exponent:
            raise BadAdapter(f"{files.directory}: {matrix.name} has numbers that are not finite in {values.dtype}")


def clear(memory: torch.Tensor) -> None:
    """Set a run of numbers to 0."""
    for start in range(0, len(memory), PIECE):
        memory[start : start + PIECE].zero_()


def _read(files: AdapterBytes, matrix: StoredMatrix) -> torch.Tensor:
    raw = torch.frombuffer(files.weights, dtype=torch.uint8, count=matrix.num_bytes, offset=matrix.start)
    return raw.view(_DTYPES[matrix.dtype]).view(matrix.shape)


def _put(target: torch.Tensor, source: torch.Tensor, scale: float) -> None:
    """Rounded once."""
    step = max(1, PIECE // source.shape[1])
    for start in range(0, len(source), step):
        piece = source[start : start + step]
        target[start : start + step] = piece if scale == 1.0 else piece.float() * scale
