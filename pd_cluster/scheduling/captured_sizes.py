"""Numbers of decodes and of tokens that steps are captured for: a step is padded to the next. Needs no torch."""

from __future__ import annotations


def bucket_sizes(limit: int) -> list[int]:
    """Numbers of decodes: 1, 2, 4, 8, then every 8th up to 64, every 16th from there, and `limit` itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, limit, 16), limit]
    return sorted({size for size in sizes if size <= limit})


def token_buckets(limit: int) -> list[int]:
    """Numbers of tokens: 16, 32, every 64th up to 512, every 128th from there, and `limit` itself.

    Products compute whole tiles of 64 or 128 rows.
    """
    sizes = [16, 32, *range(64, 512, 64), *range(512, limit, 128), limit]
    return sorted({size for size in sizes if size <= limit})
