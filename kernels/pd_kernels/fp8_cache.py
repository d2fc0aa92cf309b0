"""Keys and values that a cache holds in one byte: float8 e4m3fn (arXiv 2209.05433), with the constant scale 1.

The scale is no measurement of the values, because nodes that exchange blocks must agree on it.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3fn


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` as a cache of `dtype` holds it. In an FP8 cache a number above LARGEST becomes LARGEST.

    The clamp is explicit because some versions of torch convert such a number to NaN (2.11), others to LARGEST (2.13).
    """
    return x.clamp(-LARGEST, LARGEST).to(dtype) if dtype is FP8 else x


def indexable(x: torch.Tensor) -> torch.Tensor:
    """`x`, or its bytes if it is FP8: torch has no `index_copy_` and no `index_fill_` of FP8 (2.13, CPU)."""
    return x.view(torch.uint8) if x.dtype is FP8 else x
