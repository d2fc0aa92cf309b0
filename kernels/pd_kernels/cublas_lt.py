"""Matrix products by a chosen algorithm of cuBLASLt.

cuBLAS chooses an algorithm by rules from the shape, and the choice is often not the fastest. For the products of
Llama-3.1-8B with 40 to 224 rows on an H200, the best of cuBLASLt's first eight proposals saves 2 to 6 percent of the
time. Another order of tiles, which cuBLASLt never proposes, saves 1 to 4 percent more. The functions are called through
ctypes in the library that torch has loaded.

Source: NVIDIA cuBLAS documentation, "Using the cuBLASLt API".
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

WORKSPACE_BYTES = 32 << 20  # NVIDIA's recommendation for Hopper; algorithms that split K need it
NUM_PROPOSALS, NUM_SWIZZLED = 8, 4
_COMPUTE_32F, _FLOAT_32 = 68, 0
_BATCH_COUNT, _BATCH_STRIDE = 5, 6  # attributes of a matrix
_TRANSPOSE_A, _MAX_WORKSPACE = 3, 1  # attributes of a product, of a preference
_SWIZZLE = 4  # attribute of an algorithm: the order of tiles, 0 or 1
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_ADDRESS = ctypes.c_void_p
# Handle, product, 1, A and its layout, B and its layout, 0, C and its layout, D and its layout, algorithm, workspace,
# its size, stream. For declared arguments, ctypes takes plain integers without making an object for each
_MATMUL: list[type[ctypes.c_void_p | ctypes.c_size_t]] = [*[_ADDRESS] * 14, ctypes.c_size_t, _ADDRESS]


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm for x [M, K] times weight^T [K, N] that a graph can capture. Valid until its library is closed."""

    library: CublasLt  # owns the descriptions and the workspace
    parts: int  # parts of the product; each covers an equal, consecutive range of inputs
    launch: Callable[[int, int, int], None]  # arguments: addresses of x, the weight and the product

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply `x` [M, K] by `weight` [N, K], both contiguous and of the proposed dtype -> [M, N], or its parts.

        Raises RuntimeError when cuBLASLt reports an error.
        """
        size, parts = (x.shape[0], weight.shape[0]), self.parts
        out = x.new_empty(size) if parts == 1 else x.new_empty((parts, *size), dtype=torch.float32)
        self.launch(x.data_ptr(), weight.data_ptr(), out.data_ptr())
        return out


@dataclass(frozen=True, slots=True)
class _Shape:
    """cuBLASLt's descriptions of a product and its matrices, column-major: out^T = weight x^T."""

    product: ctypes.c_void_p
    weight: ctypes.c_void_p
    x: ctypes.c_void_p
    out: ctypes.c_void_p


class CublasLt:
    """The cuBLASLt library that torch loaded, on torch's handle.

    Use one stream at a time, because all products share a workspace.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises OSError when torch has loaded no cuBLASLt."""
        if torch.version.cuda is None:
            raise OSError("this torch was not built with CUDA")
        self._library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
        self._device = device
        with torch.cuda.device(device):
            self._handle = ctypes.c_void_p(_cublas_handle())
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._library.cublasLtMatmul.argtypes = _MATMUL
        self._created = contextlib.ExitStack()

    def close(self) -> None:
        """Destroy the descriptions that the algorithms use. Idempotent.

        The algorithms must not be called any more. Graphs that captured them stay valid.
        """
        self._created.close()

    def propose(self, num_rows: int, weight: torch.Tensor, parts: int = 1) -> list[Algorithm]:
        """Algorithms for `num_rows` rows times `weight` [N, K], each in `parts` parts with an equal range of inputs.

        cuBLASLt's proposals come first, its best guess before the others. The first of them follow with another order
        of tiles. Empty for float32, because torch decides there between TensorFloat-32 and full precision. Raises
        RuntimeError.
        """
        if weight.dtype not in _TYPES or weight.shape[1] % (8 * parts):  # 8: whole 16 bytes
            return []
        shape = self._describe(num_rows, weight.shape[0], weight.shape[1], _TYPES[weight.dtype], parts)
        preference = self._create("MatmulPreference")
        limit = ctypes.c_size_t(WORKSPACE_BYTES)
        self._call("MatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, ctypes.byref(limit), ctypes.c_size_t(8))
        proposals, count = (_Proposal * NUM_PROPOSALS)(), ctypes.c_int()
        self._call(
            "MatmulAlgoGetHeuristic", self._handle, shape.product, shape.weight, shape.x, shape.out, shape.out,
            preference, NUM_PROPOSALS, proposals, ctypes.byref(count),
        )  # fmt: skip
        found = [proposal for proposal in proposals[: count.value] if proposal.status == 0]
        swizzled = [self._swizzled(shape, proposal) for proposal in found[: NUM_SWIZZLED if parts == 1 else 0]]
        distinct = {bytes(proposal.algorithm): proposal for proposal in (*found, *swizzled) if proposal is not None}
        matmul, stream_of = self._library.cublasLtMatmul, torch._C._cuda_getCurrentRawStream
        launchers = [self._launcher(shape, proposal, matmul, stream_of) for proposal in distinct.values()]
        return [Algorithm(self, parts, launch) for launch in launchers]

    def _swizzled(self, shape: _Shape, proposal: _Proposal) -> _Proposal | None:
        """The same algorithm with another order of tiles; None if it does not support that."""
        algorithm, order, checked = proposal.algorithm, ctypes.c_uint32(1), _Proposal()
        changed = type(algorithm)(*algorithm)
        matrices = shape.weight, shape.x, shape.out, shape.out
        try:
            self._call("MatmulAlgoConfigSetAttribute", changed, _SWIZZLE, ctypes.byref(order), ctypes.c_size_t(4))
            self._call("MatmulAlgoCheck", self._handle, shape.product, *matrices, changed, ctypes.byref(checked))
        except RuntimeError:
            return None
        if checked.status or checked.workspace_bytes > WORKSPACE_BYTES:
            return None
        return _Proposal(changed, checked.workspace_bytes)

    def _launcher(
        self, shape: _Shape, proposal: _Proposal, matmul: Callable[..., int], stream_of: Callable[[int], int]
    ) -> Callable[[int, int, int], None]:
        """A function that multiplies on the current stream, given the addresses of x, the weight and the product.

        All other arguments are prepared here: a step with prompts has about 100 products, and the host must stay ahead
        of the device.
        """
        handle, product, size = self._handle, shape.product, proposal.workspace_bytes
        weight_layout, x_layout, out_layout = shape.weight, shape.x, shape.out
        one, zero = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))
        algorithm, workspace = ctypes.byref(proposal.algorithm), self._workspace.data_ptr()
        device = self._workspace.device.index

        def launch(x: int, weight: int, out: int) -> None:
            status = matmul(
                handle, product, one, weight, weight_layout, x, x_layout, zero, out, out_layout, out, out_layout,
                algorithm, workspace, size, stream_of(device),
            )  # fmt: skip
            if status:
                raise RuntimeError(f"cublasLtMatmul: status {status}")

        return launch

    def _describe(self, num_rows: int, num_outputs: int, num_inputs: int, dtype: int, parts: int) -> _Shape:
        product = self._create("MatmulDesc", _COMPUTE_32F, _FLOAT_32)
        transpose = ctypes.c_int32(1)
        self._call("MatmulDescSetAttribute", product, _TRANSPOSE_A, ctypes.byref(transpose), ctypes.c_size_t(4))
        size = num_inputs // parts
        weight, x = (self._layout(dtype, size, count, num_inputs, parts, size) for count in (num_outputs, num_rows))
        out_type = dtype if parts == 1 else _FLOAT_32
        out = self._layout(out_type, num_outputs, num_rows, num_outputs, parts, num_outputs * num_rows)
        return _Shape(product, weight, x, out)

    def _layout(
        self, dtype: int, num_rows: int, num_columns: int, column_stride: int, parts: int, part_stride: int
    ) -> ctypes.c_void_p:
        sizes = ctypes.c_uint64(num_rows), ctypes.c_uint64(num_columns), ctypes.c_int64(column_stride)
        made = self._create("MatrixLayout", dtype, *sizes)
        if parts > 1:
            count, stride = ctypes.c_int32(parts), ctypes.c_int64(part_stride)
            self._call("MatrixLayoutSetAttribute", made, _BATCH_COUNT, ctypes.byref(count), ctypes.c_size_t(4))
            self._call("MatrixLayoutSetAttribute", made, _BATCH_STRIDE, ctypes.byref(stride), ctypes.c_size_t(8))
        return made

    def _create(self, kind: str, *arguments: object) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(f"{kind}Create", ctypes.byref(made), *arguments)
        self._created.callback(self._call, f"{kind}Destroy", made)
        return made

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"cublasLt{name}")(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{name}: status {status}")


def _cublas_handle() -> int:
    """The handle of the current device and stream; cuBLASLt accepts cuBLAS handles."""
    handle: int = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    return handle
