"""Triton's latent attention against the definition: interpreted on small shapes, on a GPU on real ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_kernels.attention import AttentionShape
from pd_kernels.attention_backends import choose_attention
from pd_kernels.latent import ABSORBED_QUERIES, LatentDims, LatentRows
from pd_kernels.latent_attention import LatentAttention
from pd_kernels.latent_backend import TritonLatentBackend
from pd_kernels.triton_latent import TritonLatent
from pd_kernels.triton_latent_decode import head_groups, latent_tiling
from pd_kernels.triton_latent_prefill import ABSORBED_ROWS, AbsorbedRun, plan_chunks
from pd_kernels.values import StepOnDevice, StepSize
from tests.kernels.latent_steps import Chunk, LatentStep, attended, make_step
from tests.kernels.test_triton_attention import DEVICE, TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
DIMS = LatentDims(rank=32, rope=16, nope=16, value=32)
OTHER = LatentDims(rank=16, rope=16, nope=48, value=64)  # keys of a part that is no power of two
FULL, SMALL = LatentDims(512, 64, 128, 128), LatentDims(256, 64, 64, 128)
GLM = LatentDims(512, 64, 192, 256)
DECODES = [Chunk(39, 1), Chunk(0, 1), Chunk(15, 1), Chunk(16, 1), Chunk(130, 1), Chunk(63, 1)]
DRAFTS = [Chunk(33, 1), Chunk(47, 4), Chunk(0, 3), Chunk(70, 6), Chunk(14, 2)]


def attention_of(step: LatentStep, ops: TritonLatent | None = None) -> LatentAttention:
    """On a GPU that of the backend which serves this shape there."""
    block_size, width = step.cache.shape[1:]
    dtype, num_heads = step.query.dtype, step.query.shape[1]
    shape = AttentionShape(num_heads, 1, width, block_size, num_layers=3, dtype=dtype, latent=step.dims)
    if DEVICE.type == "cuda":
        assert choose_attention(shape, DEVICE).backend == TritonLatentBackend()
    return LatentAttention(shape, ops or TritonLatent.of(dtype))


def moved(step: LatentStep) -> LatentStep:
    """On the device, the cache still strided within a whole one."""
    if DEVICE.type == "cpu":
        return step
    whole = torch.full((len(step.cache), 1, 3, *step.cache.shape[1:]), torch.nan, dtype=step.cache.dtype, device=DEVICE)
    cache = whole[:, 0, 1]
    cache.copy_(step.cache)
    packed, new = step.packed, step.new
    places = {name: getattr(packed, name).to(DEVICE) for name in ("query_starts", "seq_lens", "block_tables")}
    named = {name: getattr(new, name).to(DEVICE) for name in ("norm", "cos", "sin", "slot_mapping")}
    return replace(
        step, query=step.query.to(DEVICE), keys=step.keys.to(DEVICE), expand=step.expand.to(DEVICE), cache=cache,
        new=new._replace(**named), packed=replace(packed, **places), rows=[rows.to(DEVICE) for rows in step.rows],
    )  # fmt: skip


def check(step: LatentStep, ops: TritonLatent | None = None) -> None:
    """A step in two layers: counters are 0 again for the next one."""
    step = moved(step)
    attention = attention_of(step, ops)
    plan, query = attention.plan(step.packed), step.query.clone()
    own = attention.ops.norm_rope_write(query, step.keys, step.new, step.cache)
    found = [plan.run(query, own, step.expand, step.cache, step.scale) for _ in range(2)]
    assert torch.equal(*found)
    compare(found[0], attended(step))


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Of two bytes the definition itself, which rounds keys and values as they are expanded, is twice as far away."""
    most = max(float(expected.abs().max()) / 2, 1)
    assert (found.double() - expected).abs().max() < TOLERANCE[found.dtype] * most


@pytest.mark.parametrize(
    ("num_heads", "chunks", "block_size"),
    [
        (16, DECODES, 16),
        (3, DRAFTS, 64),
        (20, DRAFTS[1:4], 16),
        (40, DECODES[1:5], 64),
        (10, DRAFTS[:2], 16),
        (16, [Chunk(230, 1)], 16),
        (10, [Chunk(130, 1)], 64),
    ],
)
def test_rows_of_small_steps_attend_as_defined(num_heads: int, chunks: list[Chunk], block_size: int) -> None:
    """Shares end within pairs, parts are merged, rows of drafts see no token of a part, heads fill no tile."""
    small = replace(latent_tiling(torch.float32), setup=0, least=1)
    step = make_step(chunks, num_heads=num_heads, dims=DIMS, block_size=block_size, dtype=torch.float32)
    check(step, TritonLatent(small))


@pytest.mark.parametrize(("setup", "least", "parts"), [(3, 2, 15), (5, 1, 2), (0, 9, 15)])
def test_any_shares_attend_as_defined(setup: int, least: int, parts: int) -> None:
    tiling = replace(latent_tiling(torch.float32), setup=setup, least=least, parts=parts)
    step = make_step([*DECODES, Chunk(400, 2)], num_heads=4, dims=DIMS, block_size=16, dtype=torch.float32)
    check(step, TritonLatent(tiling))


@pytest.mark.parametrize("block_size", [16, 128])
def test_two_bytes_attend_as_defined(block_size: int) -> None:
    """In tiles of 64 tokens, of one block and of several. The interpreter multiplies the bits of bfloat16."""
    check(make_step(DECODES, num_heads=5, dims=DIMS, block_size=block_size, dtype=torch.float16))


@pytest.mark.parametrize(
    ("chunks", "dims", "num_heads"),
    [
        ([Chunk(0, 37), Chunk(0, 1), Chunk(0, 70)], OTHER, 3),
        ([Chunk(9, 1), Chunk(100, 21), Chunk(33, 18), Chunk(0, 20), Chunk(20, 17)], DIMS, 2),
        ([Chunk(16, 30), Chunk(130, 50), Chunk(0, 45), Chunk(48, 41), Chunk(20, 24), Chunk(20, 25)], OTHER, 2),
    ],
    ids=["prompts", "absorbed", "expanded"],
)
def test_chunks_attend_as_defined(
    chunks: list[Chunk], dims: LatentDims, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces begin and end within chunks, and have tokens of several. No more than so many rows attend absorbed."""
    monkeypatch.setattr("pd_kernels.triton_latent_prefill.ABSORBED_ROWS", 20)
    monkeypatch.setattr("pd_kernels.triton_latent_prefill.ABSORBED_QUERIES", 25)
    monkeypatch.setattr("pd_kernels.triton_latent_prefill.PREFIX_PIECE", 50)
    check(make_step(chunks, num_heads=num_heads, dims=dims, block_size=16, dtype=torch.float32))


def test_many_short_chunks_attend_absorbed_some_at_a_time() -> None:
    """So a step of them alone needs about the memory of one long chunk, which a start measures."""
    step = make_step([Chunk(20, 100), *[Chunk(20, 150)] * 40], num_heads=1, dims=DIMS, dtype=torch.float32)
    runs = plan_chunks(step.packed, 1, 80, 16, torch.float32)
    assert all(isinstance(run, AbsorbedRun) for run in runs)
    assert [run.first for run in runs] == [0, *(run.end for run in runs[:-1])]
    assert runs[-1].end == len(step.query)
    assert max(run.end - run.first for run in runs) < ABSORBED_ROWS + ABSORBED_QUERIES


def captured(step: LatentStep, size: StepSize) -> tuple[StepOnDevice, torch.Tensor]:
    """The step with room for more sequences and tokens. Entries of the table that no token needs are far outside."""
    packed, device = step.packed, step.cache.device
    count, num_seqs = packed.num_seqs, size.num_seqs + size.has_drafts
    lens = torch.zeros(num_seqs, dtype=torch.int32, device=device)
    lens[:count] = packed.seq_lens
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    if size.has_drafts:
        starts[: count + 1], starts[count:] = packed.query_starts, packed.query_starts[-1]
    tables = torch.full((num_seqs, packed.block_tables.shape[1]), 10**6, dtype=torch.int32, device=device)
    for row, length in enumerate(packed.host_seq_lens):
        used = -(-int(length) // step.cache.shape[1])
        tables[row, :used] = packed.block_tables[row, :used]
    query = torch.full((size.num_tokens, *step.query.shape[1:]), torch.nan, dtype=step.query.dtype, device=device)
    query[: len(step.query)] = step.rotated
    return StepOnDevice(lens, lens, starts, tables, lens.new_empty(2, 0)), query


@pytest.mark.parametrize("has_drafts", [False, True])
def test_padding_of_captured_steps_is_zero(has_drafts: bool) -> None:
    step = moved(
        make_step(DRAFTS if has_drafts else DECODES, num_heads=5, dims=DIMS, block_size=16, dtype=torch.float32)
    )
    attention, count = attention_of(step), len(step.query)
    attention.ops.norm_rope_write(step.query.clone(), step.keys, step.new, step.cache)
    size = StepSize(count + 3, (count if not has_drafts else step.packed.num_seqs) + 3, 0, True, has_drafts=has_drafts)
    replayable = attention.captured(size)
    assert replayable is not None
    placed, query = captured(step, size)
    found = replayable.plan(placed).run(query, query[:, 0], step.expand, step.cache, step.scale)
    compare(found[:count], attended(step))
    assert (found[count:] == 0).all()


@pytest.mark.parametrize(("num_heads", "dtype"), [(1, torch.float32), (20, torch.bfloat16)])
def test_rows_are_written_where_their_tokens_are_and_nowhere_else(num_heads: int, dtype: torch.dtype) -> None:
    step = moved(make_step([Chunk(40, 1), Chunk(3, 5)], num_heads=num_heads, dims=OTHER, dtype=dtype))
    slots = step.new.slot_mapping.clone()
    step.new.slot_mapping[2] = -1  # padding
    before, query = step.cache.clone(), step.query.clone()
    apart = torch.full((len(query), 2, step.dims.width), torch.nan, dtype=dtype, device=DEVICE)
    apart[:, 0] = step.keys
    own = attention_of(step).ops.norm_rope_write(query, apart[:, 0], step.new, step.cache)
    tolerance = 1e-5 if dtype is torch.float32 else 0.06
    torch.testing.assert_close(query, step.rotated, rtol=0, atol=tolerance)
    torch.testing.assert_close(own, torch.cat((step.rows[0][40:], step.rows[1][3:])), rtol=0, atol=tolerance)
    written = torch.arange(len(slots), device=DEVICE) != 2
    assert torch.equal(step.cache[slots // 16, slots % 16][written], own[written])
    before[slots[written] // 16, slots[written] % 16] = own[written]
    assert torch.equal(step.cache.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize(
    ("num_heads", "groups"),
    [
        (1, (1, 1, 1)), (16, (4, 1, 1)), (20, (5, 2, 1)), (5, (1, 1, 1)), (7, (1, 1, 1)), (10, (2, 1, 1)),
        (13, (1, 1, 1)), (32, (8, 2, 1)), (40, (10, 4, 2)), (64, (16, 4, 2)),
        (128, (32, 8, 4)), (37, (37, 37, 37)),
    ],
)  # fmt: skip
def test_heads_are_in_equal_groups(num_heads: int, groups: tuple[int, int, int]) -> None:
    """Of one sequence, of some and of many. Two groups of 20 heads are for 128 sequences at most."""
    assert tuple(head_groups(num_heads, num_seqs, 512) for num_seqs in (1, 2, 257)) == groups
    assert (head_groups(20, 128, 512), head_groups(20, 129, 512)) == (2, 1)
    assert (head_groups(32, 8, 512), head_groups(32, 8, 256), head_groups(32, 8, 16)) == (2, 1, 1)


def test_other_groups_are_refused_by_reason() -> None:
    cuda = torch.device("cuda")
    shape = AttentionShape(16, 1, FULL.width, 64, 3, torch.bfloat16, latent=FULL)
    backend = TritonLatentBackend()
    assert [backend.why_not(replace(shape, latent=dims), cuda) for dims in (FULL, SMALL, GLM)] == ["", "", ""]
    assert backend.why_not(shape, torch.device("cpu")) == "needs a GPU"
    assert backend.why_not(replace(shape, latent=None), cuda) == "attends over latent keys alone"
    assert backend.why_not(replace(shape, window=9), cuda) == "has no windows"
    reason = "takes sizes of powers of two from 16 on, not 512, 64, 72, 128"
    assert backend.why_not(replace(shape, latent=FULL._replace(nope=72)), cuda) == reason
    assert backend.why_not(replace(shape, latent=FULL._replace(rank=24)), cuda) != ""


REAL = {  # heads, sizes, block size, chunks
    "moonlight": (16, FULL, 64, [*(Chunk(length, 1) for length in range(0, 4000, 61))]),
    "moonlight-drafts": (16, FULL, 64, [*(Chunk(length, 1 + length % 5) for length in range(0, 4000, 61))]),
    "moonlight-one": (16, FULL, 64, [Chunk(15000, 1)]),
    "block-16": (16, FULL, 16, [Chunk(1000, 1), Chunk(77, 1), Chunk(0, 1), Chunk(5000, 1)]),
    "glm": (20, GLM, 64, [*(Chunk(length, 1) for length in range(0, 3000, 61))]),
    "glm-drafts": (20, GLM, 64, [*(Chunk(length, 4) for length in range(0, 3000, 61))]),
    "mistral": (32, SMALL, 64, [*(Chunk(length, 1) for length in range(0, 3000, 61))]),
    "kimi": (64, FULL, 64, [*(Chunk(length, 1) for length in range(0, 3000, 97))]),
    "v3": (128, FULL, 128, [*(Chunk(length, 1 + length % 2) for length in range(0, 1500, 97))]),
    "prompts": (16, FULL, 64, [Chunk(0, 1), Chunk(70, 1), Chunk(0, 700), Chunk(0, 1024), Chunk(0, 33)]),
    "prefixes": (16, FULL, 64, [Chunk(3000, 100), Chunk(9000, 300), Chunk(64, 700), Chunk(500, 20)]),
    "glm-prefixes": (20, GLM, 64, [Chunk(0, 600), Chunk(5000, 300), Chunk(500, 20)]),
    "mistral-prefixes": (32, SMALL, 64, [Chunk(0, 600), Chunk(5000, 300), Chunk(500, 20)]),
    "v3-prefixes": (128, FULL, 64, [Chunk(0, 300), Chunk(700, 200), Chunk(500, 20)]),
    "many": (5, FULL, 64, [*(Chunk(int(n), 1) for n in np.random.default_rng(0).integers(0, 300, 300))]),
}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("name", REAL)
def test_real_steps_attend_as_defined(name: str) -> None:
    num_heads, dims, block_size, chunks = REAL[name]
    check(make_step(chunks, num_heads=num_heads, dims=dims, block_size=block_size, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_captured_step_follows_new_lengths(has_drafts: bool) -> None:
    """Captured for one step, replayed for another."""
    lengths = ([1024] * 20, [7, 0, 63, 64, 5000, 900])
    steps = [
        moved(make_step([Chunk(n, 1 + has_drafts * (n % 4)) for n in ends], num_heads=16, dims=FULL, block_size=64,
                        dtype=torch.bfloat16))
        for ends in lengths
    ]  # fmt: skip
    size = StepSize(64, 24, 0, True, has_drafts=has_drafts) if has_drafts else StepSize(24, 24, 0, True)
    attention = attention_of(steps[0])
    placed = [captured(step, size) for step in steps]
    width = max(one.block_tables.shape[1] for one, _ in placed)
    tables = torch.zeros(len(placed[0][0].seq_lens), width, dtype=torch.int32, device=DEVICE)
    place, query = replace(placed[0][0], block_tables=tables), placed[0][1].clone().nan_to_num_()
    num_blocks = max(len(step.cache) for step in steps)
    cache = torch.zeros(num_blocks, 64, FULL.width, dtype=torch.bfloat16, device=DEVICE)
    replayable = attention.captured(size)
    assert replayable is not None

    def run() -> torch.Tensor:
        return replayable.plan(place).run(query, query[:, 0], steps[0].expand, cache, steps[0].scale)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for step, (values, asked) in zip(steps, placed, strict=True):
        attention.ops.norm_rope_write(step.query.clone(), step.keys, step.new, step.cache)
        cache[: len(step.cache)] = step.cache
        place.block_tables[:, : values.block_tables.shape[1]] = values.block_tables
        place.seq_lens.copy_(values.seq_lens)
        place.query_starts.copy_(values.query_starts)
        query.copy_(asked.nan_to_num())
        for _ in range(2):
            graph.replay()
            compare(found[: len(step.query)], attended(replace(step, expand=steps[0].expand)))


def test_rows_have_a_plan_for_all_layers() -> None:
    step = moved(make_step(DECODES, num_heads=2, dims=DIMS, dtype=torch.float32))
    rows = attention_of(step).plan(step.packed).rows
    assert isinstance(rows, LatentRows)
    ops = TritonLatent.of(torch.float32)
    query = step.rotated.new_ones(len(step.query), 2, DIMS.width)
    for _ in range(2):
        ops.decode(query[..., : DIMS.rank], query[..., DIMS.rank :], step.cache.nan_to_num(), rows, 1.0)
    assert len(rows.plans) == 1
