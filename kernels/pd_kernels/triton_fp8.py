# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Parts of kernels that read and write a cache of e4m3 numbers (`fp8_cache.FP8`).

Products are in float16 if queries have two bytes: float16 has every e4m3 number, and a Hopper GPU converts two of them
in one instruction. A conversion to bfloat16 goes on from there, number by number, at a quarter of that rate.
"""

from __future__ import annotations

import triton
import triton.language as tl

_HAS_ASM = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def beside_fp8(q):
    """Queries in the dtype of their products with e4m3 numbers. Float16 has all of bfloat16 between 2^-14 and 65504."""
    if q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return q


@triton.jit
def split_pairs(pairs):
    """The even and the odd columns, in float16, of a tile of pairs: two e4m3 numbers in an int16.

    The matrix unit wants the numbers of two tokens side by side. Shared memory transposes elements of two bytes on the
    way to registers (ldmatrix), and no smaller ones: single e4m3 numbers would be loaded one by one.
    """
    if _HAS_ASM:
        even, odd = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit
def stored(x, cache):
    """`fp8_cache.stored` for the cache that the pointer `cache` points to. NaN stays NaN."""
    if cache.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(cache.dtype.element_ty)
