"""Chooses the sizes of steps to capture, and the captured size that serves a step. Pure policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pd_cluster.scheduling.captured_sizes import bucket_sizes, token_buckets
from pd_kernels.values import StepSize

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_cluster.scheduling.batch import SequenceChunk

FAR_KEYS = 1024  # a chunk that ends after this many keys is faster in a size for far chunks
FEW_SEQS = 64  # most steps have fewer; room for more costs time where only the sampling rows go on
# (least number of chunks, tokens each): a size has room for the larger of the first number and as many chunks of the
# second number of tokens as fit. Where programs share keys, empty tiles cost 0.1 ms in a step of 192 tokens (8B, one
# H200), elsewhere nothing
NEAR_CHUNKS, FAR_CHUNKS = (8, 16), (4, 32)
_MOST_PADDING = 256  # tokens; computing more takes the device longer than the host takes to launch the step unpadded


class GraphSizes:
    """Chooses the captured size for a step.

    The choice depends on the sizes and the chunks alone. One rank makes it for all ranks and names it with the batch.
    """

    def __init__(self, sizes: Iterable[StepSize]) -> None:
        """`sizes`: the sizes that every rank has captured."""
        self.sizes = tuple(sizes)
        adapted = [size for size in self.sizes if size.has_adapters]
        self._kinds = _SizesOfKind.of([size for size in self.sizes if not size.has_adapters]), _SizesOfKind.of(adapted)

    def choose(self, chunks: tuple[SequenceChunk, ...], *, has_adapters: bool = False) -> StepSize | None:
        """The smallest size that serves a step of these chunks; None: launch the step without a graph.

        Steps with decodes only prefer a size for decodes only, with drafts or without. None also when all sizes are far
        too large, as for many chunks of few tokens, or when no memory was left for smaller sizes. `has_adapters`:
        whether some rows have adapters.
        """
        if not chunks or not self.sizes:
            return None
        kind = self._kinds[has_adapters]
        return kind.of_decodes(chunks) or kind.of_drafts(chunks) or kind.of_step(chunks)


class _SizesOfKind(NamedTuple):
    """The sizes for steps with adapters, or those for steps without."""

    decodes: list[StepSize]  # by number of sequences
    drafts: list[StepSize]  # by number of tokens
    steps: list[StepSize]

    @classmethod
    def of(cls, sizes: list[StepSize]) -> _SizesOfKind:
        decodes = sorted((size for size in sizes if size.is_plain), key=lambda size: size.num_seqs)
        drafts = sorted((size for size in sizes if size.has_drafts), key=lambda size: size.num_tokens)
        return cls(decodes, drafts, [size for size in sizes if size.num_chunks])

    def of_decodes(self, chunks: tuple[SequenceChunk, ...]) -> StepSize | None:
        if not self.decodes or len(chunks) > self.decodes[-1].num_seqs:
            return None
        for chunk in reversed(chunks):  # chunks of several tokens come last
            if chunk.num_tokens != 1 or chunk.num_samples != 1 or chunk.reads:
                return None
        return next(size for size in self.decodes if size.num_seqs >= len(chunks))

    def of_drafts(self, chunks: tuple[SequenceChunk, ...]) -> StepSize | None:
        if not chunks[-1].drafts:  # prompts come last
            return None
        num_tokens = 0
        for chunk in chunks:
            if chunk.num_tokens - len(chunk.drafts) != 1 or chunk.num_samples != 1 or chunk.reads:
                return None
            num_tokens += chunk.num_tokens
        fitting = (
            size for size in self.drafts
            if 0 <= size.num_tokens - num_tokens < _MOST_PADDING and size.num_seqs >= len(chunks)
        )  # fmt: skip
        return next(fitting, None)

    def of_step(self, chunks: tuple[SequenceChunk, ...]) -> StepSize | None:
        num_tokens = num_decodes = num_rows = 0
        for chunk in chunks:
            if chunk.num_samples > 1 or chunk.reads:
                return None
            num_rows += chunk.num_rows
            if num_tokens == num_decodes and chunk.num_tokens == 1:
                num_decodes += 1
            num_tokens += chunk.num_tokens
        later = chunks[num_decodes:]
        is_far = any(chunk.start + chunk.num_tokens >= FAR_KEYS for chunk in later)
        fitting = [
            size for size in self.steps
            if 0 <= size.num_tokens - num_tokens < _MOST_PADDING and size.num_seqs >= max(len(chunks), num_rows)
            and size.num_chunks >= len(later) and (size.has_decodes or not num_decodes)
        ]  # fmt: skip
        return min(
            fitting,
            key=lambda size: (size.num_tokens, size.has_decodes, size.num_seqs, size.is_far != is_far),
            default=None,
        )


def decode_sizes(limit: int) -> list[StepSize]:
    """Sizes of steps with decodes only, one for each of `bucket_sizes`."""
    return [StepSize(size, size, 0, has_decodes=True) for size in bucket_sizes(limit)]


def adapted_sizes(sizes: Sequence[StepSize]) -> list[StepSize]:
    """Those of `sizes` for steps with adapters. Of those with chunks, one in three: with room for most sequences."""
    most = dict[int, int]()  # by number of tokens
    for size in sizes:
        most[size.num_tokens] = max(most.get(size.num_tokens, 0), size.num_seqs)
    return [
        replace(size, has_adapters=True)
        for size in sizes
        if not size.num_chunks or (size.has_decodes and size.num_seqs == most[size.num_tokens])
    ]


def draft_sizes(limit: int, max_seqs: int) -> list[StepSize]:
    """Sizes of steps of decodes with drafts alone: those of `token_buckets`, and 2, 4 and 8 tokens."""
    buckets = [size for size in (2, 4, 8, *token_buckets(limit)) if size <= limit]
    return [StepSize(size, min(size, max_seqs), 0, has_decodes=True, has_drafts=True) for size in buckets]


def step_sizes(limit: int, max_seqs: int) -> list[StepSize]:
    """Sizes of steps with chunks. Each of `token_buckets` has six sizes; equal ones are dropped.

    One size has no decodes, one has room for FEW_SEQS sequences, and one has room for `max_seqs`. Each of these exists
    for chunks near the start of their sequences, and for chunks after many keys.
    """
    sizes = set()
    for num_tokens in token_buckets(limit):
        most = min(num_tokens, max_seqs)
        few = min(FEW_SEQS, most)
        for is_far, (least, num_tokens_each) in enumerate((NEAR_CHUNKS, FAR_CHUNKS)):
            num_chunks = min(max(least, num_tokens // num_tokens_each), few)
            for num_seqs, has_decodes in ((num_chunks, False), (few, True), (most, True)):
                sizes.add(StepSize(num_tokens, num_seqs, num_chunks, has_decodes, bool(is_far)))
    return sorted(sizes, key=lambda size: (size.num_tokens, size.num_seqs, size.has_decodes, size.is_far))
