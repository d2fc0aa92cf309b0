"""Steps of a model with states over a cache of one's own: the test gives each sequence its blocks and slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.models.forward_inputs import ForwardInputs, Tail
from pd_cluster.models.state_views import state_caches
from pd_kernels.attention import AttentionShape
from pd_kernels.state import PIECE, StatePlan
from pd_kernels.torch_attention import TorchAttention
from pd_kernels.values import KeysValues, PackedSequences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pd_cluster.models.mixer import LayerCache
    from pd_cluster.models.model import Model

BLOCK, NUM_BLOCKS, NUM_SLOTS = 16, 64, 8


@dataclass(frozen=True)
class Chunk:
    """Tokens of a sequence in a step, the first of them at `start`."""

    ids: Sequence[int]
    start: int
    table: Sequence[int]  # blocks of the sequence
    slot: int
    source: int = -1  # -1: `slot`, or nothing at the start of a sequence
    saves: Mapping[int, int] = field(default_factory=dict)  # piece -> slot

    @property
    def pieces(self) -> range:
        """Those that it touches."""
        return range(self.start // PIECE, -(-(self.start + len(self.ids)) // PIECE))


def state_plan(chunks: Sequence[Chunk]) -> StatePlan:
    """The plan of a step of `chunks`."""
    pieces = [chunk.pieces for chunk in chunks]
    saved = [chunk.saves.get(piece, -1) for chunk, own in zip(chunks, pieces, strict=True) for piece in own]
    sources = [chunk.source if chunk.source >= 0 else chunk.slot if chunk.start else -1 for chunk in chunks]
    return StatePlan(
        sources=torch.tensor(sources, dtype=torch.int32),
        slots=torch.tensor([chunk.slot for chunk in chunks], dtype=torch.int32),
        starts=torch.tensor([0, *accumulate(len(chunk.ids) for chunk in chunks)], dtype=torch.int32),
        positions=torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32),
        saves=torch.tensor(saved, dtype=torch.int32),
        piece_starts=torch.tensor([0, *accumulate(map(len, pieces))], dtype=torch.int32),
    )


class StateSteps:
    """A model, keys and values of NUM_BLOCKS blocks, and NUM_SLOTS states, in all of which there are NaNs at first."""

    def __init__(self, model: Model) -> None:
        spec = model.spec
        assert spec.state is not None
        wide = torch.promote_types(model.dtype, torch.float32)
        full, state = spec.kv_groups(BLOCK, str(model.dtype).removeprefix("torch.").replace("64", "32"))
        self.model = model
        self.states = torch.full((NUM_SLOTS, *state.shape), torch.nan, dtype=wide)
        self.caches: dict[int, LayerCache] = dict(state_caches(spec.state, self.states, model.dtype))
        keys = torch.zeros(NUM_BLOCKS, *full.shape, dtype=model.dtype)
        for place, layer in enumerate(full.layers):
            self.caches[layer] = KeysValues(keys[:, :, place, 0], keys[:, :, place, 1])
        shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, BLOCK, len(full.layers), model.dtype)
        self._attention = TorchAttention(shape)

    @torch.inference_mode()
    def step(self, *chunks: Chunk, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Logits of all tokens, or of some `rows`. Chunks of one token come first."""
        counts = np.array([len(chunk.ids) for chunk in chunks])
        lengths = counts + [chunk.start for chunk in chunks]
        tables = np.zeros((len(chunks), NUM_BLOCKS), np.int32)
        for row, chunk in enumerate(chunks):
            tables[row, : len(chunk.table)] = chunk.table
        packed = PackedSequences(
            num_decodes=int((counts == 1).sum()),
            query_starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            seq_lens=torch.from_numpy(lengths.astype(np.int32)),
            block_tables=torch.from_numpy(tables),
            host_query_lens=counts,
            host_seq_lens=lengths,
        )
        places = [(row, chunk.start + at) for row, chunk in enumerate(chunks) for at in range(len(chunk.ids))]
        inputs = ForwardInputs(
            token_ids=torch.tensor([token for chunk in chunks for token in chunk.ids]),
            positions=torch.tensor([place for _, place in places]),
            slot_mappings=[torch.tensor([int(tables[row, at // BLOCK]) * BLOCK + at % BLOCK for row, at in places])],
            plans=[self._attention.plan(packed)],
            tail=None if rows is None else Tail(torch.tensor(rows, dtype=torch.int64), None),
            states=state_plan(chunks),
        )
        return self.model.forward(inputs, self.caches).clone()
