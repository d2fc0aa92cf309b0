"""Checks of the kernels' arguments. They raise before a launch, never after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_kernels.fp8_cache import FP8

if TYPE_CHECKING:
    import torch

    from pd_kernels.values import KeysValues, NewTokens


def check_cache(cache: KeysValues) -> None:
    """Check that keys and values are one layer's views of a block-first cache.

    A (block, head) tile must be contiguous, heads a whole number of tiles apart, and blocks a whole number of heads, at
    least `num_kv_heads`: more in memory that several groups share. Raises ValueError.
    """
    key_cache, value_cache = cache
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(f"cache views must be 4-D and equal in shape, not {key_cache.shape} and {value_cache.shape}")
    if key_cache.dtype != value_cache.dtype or key_cache.stride() != value_cache.stride():
        raise ValueError("the K and V views differ in dtype or stride")
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    stride = key_cache.stride()
    tile = block_size * head_dim
    if stride[2:] != (head_dim, 1) or stride[1] % tile or stride[0] % stride[1] or stride[0] < stride[1] * num_kv_heads:
        raise ValueError(
            f"cache view {tuple(key_cache.shape)} has strides {stride}: not a layer of a block-first cache"
        )


def check_query(query: torch.Tensor, key_cache: torch.Tensor, num_tokens: int) -> None:
    """Check that `query` is `[num_tokens, num_heads, head_dim]` of the cache's dtype. Raises ValueError.

    Queries beside an FP8 cache have another dtype. num_heads must be a multiple of the cache's KV heads, and the last
    stride must be 1.
    """
    num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    if query.dim() != 3 or query.shape[0] != num_tokens or query.shape[2] != head_dim or query.stride(2) != 1:
        raise ValueError(
            f"query must be [{num_tokens}, heads, {head_dim}] with unit last stride, not {tuple(query.shape)}"
        )
    if query.shape[1] % num_kv_heads:
        raise ValueError(f"{query.shape[1]} query heads are not a multiple of {num_kv_heads} KV heads")
    if query.dtype != key_cache.dtype and key_cache.dtype is not FP8:
        raise ValueError(f"query is {query.dtype}, the cache {key_cache.dtype}")


def check_heads(heads: torch.Tensor, new: NewTokens, cache: KeysValues) -> None:
    """Check the arguments of `reference.norm_rope_write`, except the norms. Raises ValueError."""
    (_, cos, sin, slot_mapping), key_cache = new, cache.keys
    _, num_kv_heads, _, size = key_cache.shape
    if (
        heads.dim() != 3
        or heads.shape[1] <= 2 * num_kv_heads
        or (heads.shape[2], *heads.stride()[1:]) != (size, size, 1)
    ):
        raise ValueError(f"heads must be [T, query + 2 * {num_kv_heads}, {size}], rows contiguous, not {heads.shape}")
    num_tokens = len(heads)
    if (heads.dtype != key_cache.dtype and key_cache.dtype is not FP8) or len(slot_mapping) != num_tokens:
        raise ValueError(f"{heads.dtype} of {num_tokens} tokens into {key_cache.dtype} at {len(slot_mapping)} slots")
    half, most = cos.shape[-1], size // 2
    if cos.shape != (num_tokens, half) or half > most or not cos.is_contiguous() or not sin.is_contiguous():
        raise ValueError(f"cos and sin must be contiguous [{num_tokens}, at most {most}], not {tuple(cos.shape)}")


def output(out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Returns `out`, or a new tensor of `shape` like `like` if `out` is None.

    Raises ValueError unless `out` is contiguous, of this shape, and with the device and dtype of `like`.
    """
    if out is None:
        return like.new_empty(shape)
    if out.shape != shape or out.dtype != like.dtype or out.device != like.device or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {shape} of {like.dtype}, not {tuple(out.shape)} of {out.dtype}")
    return out


def check_write(key: torch.Tensor, value: torch.Tensor, cache: KeysValues, slot_mapping: torch.Tensor) -> None:
    """Check the arguments of `reference.write_cache`. Raises ValueError.

    `key`, `value`: `[T, num_kv_heads, head_dim]` of the cache's dtype, unless that is FP8; `slot_mapping`: int64 `[T]`.
    """
    check_cache(cache)
    key_cache = cache.keys
    expected = (slot_mapping.shape[0], key_cache.shape[1], key_cache.shape[3])
    if tuple(key.shape) != expected or tuple(value.shape) != expected:
        raise ValueError(f"key and value must be {expected}, not {tuple(key.shape)} and {tuple(value.shape)}")
    if str(slot_mapping.dtype) != "torch.int64" or slot_mapping.dim() != 1:
        raise ValueError("slot_mapping must be int64 and 1-D")
    if (key.dtype != key_cache.dtype or value.dtype != key_cache.dtype) and key_cache.dtype is not FP8:
        raise ValueError(f"key and value must have the cache's dtype {key_cache.dtype}")
