"""Which sizes are captured, and which of them serves a step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.scheduling.batch import SequenceChunk
from pd_cluster.scheduling.captured_sizes import bucket_sizes, token_buckets
from pd_cluster.worker.cuda_graphs.graph_sizes import (
    GraphSizes,
    decode_sizes,
    draft_sizes,
    step_sizes,
)
from pd_kernels.values import StepSize
from tests.worker.repeated_graphs import near_sizes


def chunks_of(*chunks: tuple[int, int], samples: int = 1) -> tuple[SequenceChunk, ...]:
    return tuple(SequenceChunk(i, begin, count, num_samples=samples) for i, (begin, count) in enumerate(chunks))


def test_which_size_serves_decodes_alone() -> None:
    sizes = decode_sizes(6)
    choose, decode = GraphSizes(sizes).choose, (9, 1)
    found = [choose(chunks_of(*[decode] * count)) for count in range(8)]
    assert found == [None, *(sizes[at] for at in (0, 1, 2, 2, 3, 3)), None]
    assert choose(chunks_of(decode, (0, 5))) is None
    assert choose((*chunks_of(decode), SequenceChunk(1, 0, 1))) is None  # one token in the middle of a prompt
    assert choose((*chunks_of(decode), SequenceChunk(1, 9, 1, num_samples=2))) is None


def test_which_size_serves_a_step() -> None:
    sizes = [
        StepSize(16, 4, 4, has_decodes=False), StepSize(16, 8, 2, has_decodes=True),
        StepSize(32, 4, 4, has_decodes=False), StepSize(32, 4, 4, has_decodes=False, is_far=True),
        StepSize(32, 8, 2, has_decodes=True), StepSize(32, 20, 2, has_decodes=True),
    ]  # fmt: skip

    def size_of(*chunks: tuple[int, int], samples: int = 1) -> StepSize | None:
        return GraphSizes(sizes).choose(chunks_of(*chunks, samples=samples))

    decode = (9, 1)
    assert size_of((0, 16)) == sizes[0]
    assert size_of(decode, (0, 15)) == sizes[1]
    assert size_of((0, 17)) == sizes[2]
    assert size_of((0, 30), decode) == sizes[2], "a token after a chunk attends as one"
    assert size_of((2000, 17)) == sizes[3]
    assert size_of((2000, 16)) == sizes[0], "fewer tokens before keys"
    assert size_of((2000, 1), (0, 20)) == sizes[4]
    assert size_of(*[decode] * 9, (0, 2)) == sizes[5]
    assert size_of(decode, *[(0, 2)] * 3) is None, "chunks"
    assert size_of(*[decode] * 21) is None, "sequences"
    assert size_of((0, 33)) is None, "tokens"
    assert size_of((0, 16), samples=2) is None


def test_no_size_serves_steps_that_are_far_smaller() -> None:
    """Without memory for smaller sizes, or of more chunks than a step of so few tokens has room for."""
    largest = StepSize(300, 6, 6, has_decodes=True)
    choose = GraphSizes([largest, StepSize(16, 4, 4, has_decodes=False)]).choose
    assert choose((SequenceChunk(0, 0, 45),)) == largest
    assert choose((SequenceChunk(0, 0, 44),)) is None
    assert choose(tuple(SequenceChunk(i, 0, 2) for i in range(5))) is None


def test_bucket_sizes() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(6) == [1, 2, 4, 6]
    assert bucket_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert bucket_sizes(256)[-3:] == [224, 240, 256]


def test_token_buckets() -> None:
    assert token_buckets(16) == [16]
    assert token_buckets(700) == [16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 700]
    assert token_buckets(1400)[-4:] == [1024, 1152, 1280, 1400]


def test_step_sizes() -> None:
    assert near_sizes(32, 3) == [
        StepSize(16, 3, 3, has_decodes=False), StepSize(16, 3, 3, has_decodes=True),
        StepSize(32, 3, 3, has_decodes=False), StepSize(32, 3, 3, has_decodes=True),
    ]  # fmt: skip
    largest = [size for size in near_sizes(1024, 256) if size.num_tokens == 1024]
    assert largest == [
        StepSize(1024, 64, 64, has_decodes=False), StepSize(1024, 64, 64, has_decodes=True),
        StepSize(1024, 256, 64, has_decodes=True),
    ]  # fmt: skip
    sizes = [size for size in step_sizes(192, 256) if size.num_tokens == 192]
    assert {(size.num_chunks, size.is_far) for size in sizes} == {(12, False), (6, True)}
    assert all(size.num_chunks <= size.num_seqs <= size.num_tokens for size in step_sizes(1024, 256))


def drafts(*counts: int) -> tuple[SequenceChunk, ...]:
    return tuple(SequenceChunk(i, 9, 1 + count, num_samples=1, drafts=(5,) * count) for i, count in enumerate(counts))


def test_a_size_has_room_for_the_rows_of_drafts() -> None:
    sizes = [
        *decode_sizes(4), StepSize(16, 4, 4, has_decodes=True), StepSize(16, 8, 4, has_decodes=True),
        StepSize(16, 16, 4, has_decodes=True),
    ]  # fmt: skip
    choose = GraphSizes(sizes).choose
    assert choose(drafts(0, 0, 0)) == StepSize(4, 4, 0, has_decodes=True)
    assert choose(drafts(3)) == StepSize(16, 4, 4, has_decodes=True)
    assert choose(drafts(0, 3)) == StepSize(16, 8, 4, has_decodes=True), "five rows of two sequences"
    assert choose(drafts(0, 7)) == StepSize(16, 16, 4, has_decodes=True)
    assert choose((*drafts(0, 3), SequenceChunk(9, 0, 6))) == StepSize(16, 8, 4, has_decodes=True), "it samples nothing"
    assert choose(drafts(1, 1, 1, 1, 1)) is None, "chunks"
    assert choose(drafts(15, 0)) is None, "rows"


def test_draft_sizes() -> None:
    sizes = draft_sizes(40, 6)
    assert [(size.num_tokens, size.num_seqs, size.num_rows) for size in sizes] == [
        (2, 2, 2), (4, 4, 4), (8, 6, 8), (16, 6, 16), (32, 6, 32), (40, 6, 40)
    ]  # fmt: skip
    assert not any(size.num_chunks or size.is_plain for size in sizes)
    assert [size.num_tokens for size in draft_sizes(3, 2)] == [2, 3]
    assert len(draft_sizes(512, 256)) == 13


@pytest.mark.parametrize("max_seqs", [1, 6, 256])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_step_of_decodes_with_drafts_has_a_size(max_seqs: int, data: st.DataObject) -> None:
    """As many drafts in all as there may be sequences. It is the smallest size, and of decodes alone."""
    own = draft_sizes(2 * max_seqs, max_seqs)
    choose = GraphSizes([*decode_sizes(max_seqs), *near_sizes(64, max_seqs), *own]).choose
    counts = data.draw(st.lists(st.integers(0, min(16, max_seqs)), min_size=1, max_size=max_seqs))
    while sum(counts) > max_seqs:
        counts.pop()
    counts = counts or [1]
    size, num_tokens = choose(drafts(*sorted(counts))), len(counts) + sum(counts)
    assert size is not None
    assert size.has_drafts == (num_tokens > len(counts))
    if size.has_drafts:
        assert size.num_tokens == min(each.num_tokens for each in own if each.num_tokens >= num_tokens)
        assert len(counts) <= size.num_seqs


def test_only_decodes_alone_have_the_sizes_of_drafts() -> None:
    own = draft_sizes(512, 256)
    choose = GraphSizes([*own, *near_sizes(64, 32)]).choose
    with_prompt = choose((*drafts(1, 1), SequenceChunk(9, 0, 6)))
    assert with_prompt is not None
    assert with_prompt.num_chunks
    assert choose((*drafts(1), SequenceChunk(8, 9, 2, num_samples=1, reads=True, drafts=(5,)))) is None
    assert GraphSizes(own).choose(drafts(*[2] * 256)) is None, "more drafts than sequences: launched without a graph"
    assert GraphSizes(own[-1:]).choose(drafts(15)) is None, "no memory was left for smaller ones"
