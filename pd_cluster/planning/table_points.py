"""Which steps a step table measures: some sixty, each of a captured size. Pure."""

from __future__ import annotations

from typing import NamedTuple

NEAR, FAR = 1024, 4096  # context of decodes
BEFORE = 8192  # tokens before a chunk, where the time of keys is measured
DECODES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 128, 192, 256)
FAR_DECODES = (1, 8, 32, 128)
PROMPTS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
BESIDE = {  # tokens of steps, by their decodes: of a mixture the first ones of each choose most of the experts
    1: (16, 64, 256, 1024, 2048),
    8: (16, 32, 64, 128, 256, 512, 1024, 2048),
    32: (64, 128, 192, 256, 384, 512, 768, 1024, 2048),
    128: (192, 256, 512, 1024, 2048),
}
KEYS = (64, 128, 256, 512, 1024, 2048)
HOT = ((0, 1024), (0, 2048), (32, 2048))  # decodes and tokens of the steps that are also measured back to back


class PlannedPoint(NamedTuple):
    """As in StepPoint."""

    num_decodes: int
    context: int
    num_tokens: int
    before: int
    is_hot: bool = False


def planned_points(max_seqs: int, step_tokens: int, max_len: int) -> list[PlannedPoint]:
    """Those that a node of these limits may run: contexts are shortened, and what is then equal is measured once."""
    near, far, before = (min(length, max_len // 2) for length in (NEAR, FAR, BEFORE))
    points = [PlannedPoint(num, near, 0, 0) for num in (*DECODES, max_seqs)]
    points += [PlannedPoint(num, far, 0, 0) for num in FAR_DECODES if far > near]
    points += [PlannedPoint(0, 0, size, 0, (0, size) in HOT) for size in (*PROMPTS, step_tokens)]
    points += [
        PlannedPoint(num, near, size - num, 0, (num, size) in HOT) for num, sizes in BESIDE.items() for size in sizes
    ]
    points += [PlannedPoint(0, 0, size, before) for size in KEYS]
    return list(dict.fromkeys(point for point in points if _fits(point, max_seqs, step_tokens, max_len)))


def _fits(point: PlannedPoint, max_seqs: int, step_tokens: int, max_len: int) -> bool:
    is_short = point.before + point.num_tokens < max_len
    num_rows = point.num_decodes + (point.num_tokens > 0)
    return num_rows <= max_seqs and point.num_decodes + point.num_tokens <= step_tokens and is_short
