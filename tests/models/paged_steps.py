"""Steps of one rank's model over a paged cache of that rank's heads, without a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.models.forward_inputs import ForwardInputs, Tail
from pd_cluster.models.state_views import state_caches
from pd_cluster.worker.kernel_selection import latent_dims
from pd_cluster.worker.kv_cache import view_of_layer
from pd_kernels.attention import AttentionShape
from pd_kernels.latent_attention import LatentAttention
from pd_kernels.torch_attention import TorchAttention
from pd_kernels.torch_latent import TorchLatent
from pd_kernels.values import PackedSequences
from tests.models.state_steps import Chunk, state_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.models.mixer import LayerCache
    from pd_cluster.models.model import Model
    from pd_cluster.models.shard import Shard
    from pd_kernels.attention import AttentionPlan
    from pd_kernels.latent import LatentPlan
    from pd_kernels.state import StatePlan

BLOCK, BLOCKS_OF_SEQUENCE, NUM_SEQUENCES = 16, 4, 6
TABLES = np.random.default_rng(5).permutation(NUM_SEQUENCES * BLOCKS_OF_SEQUENCE).reshape(NUM_SEQUENCES, -1)
Part = tuple[int, int, int]  # of a step: sequence, its first token, number of tokens; parts of one token come first
STEPS: list[tuple[list[Part], list[int] | None]] = [  # which parts sample; None: all
    ([(0, 0, 20), (1, 0, 7)], [0, 1]),
    ([(0, 20, 1), (1, 7, 1), (2, 0, 33)], [0, 1]),
    ([(0, 21, 1), (1, 8, 1), (2, 33, 5), (3, 0, 3)], []),
    ([(0, 22, 1), (1, 9, 1), (2, 38, 1)], None),
    ([(0, 23, 1), (1, 10, 1), (2, 39, 1), (3, 3, 1), (4, 0, 1), (5, 0, 1)], None),
]


@dataclass
class ServedSteps:
    """What one rank leaves behind."""

    logits: list[torch.Tensor]  # by step, as the model returns them
    caches: list[torch.Tensor]  # by KV group: [blocks, heads of this rank, layers, 2, BLOCK, head_dim], or of states
    head_ids: range


@torch.inference_mode()
def serve_steps(
    model: Model, shard: Shard, steps: Sequence[tuple[list[Part], list[int] | None]] = STEPS
) -> ServedSteps:
    """Compute `steps` with fixed token ids."""
    spec, dtype = model.spec, model.dtype
    num_heads, num_kv_heads = spec.num_heads // shard.size, len(shard.kv_heads(spec.num_kv_heads))
    groups, states = list(spec.kv_groups(BLOCK, "float32")), None
    if spec.state is not None:
        states = torch.zeros(TABLES.size, *groups.pop().rank_shape(shard.size))
    caches = [torch.zeros((TABLES.size, num_kv_heads, *group.shape[1:]), dtype=dtype) for group in groups]
    layers: dict[int, LayerCache] = {
        layer: view_of_layer(group.kind, cache, place)
        for group, cache in zip(groups, caches, strict=True)
        for place, layer in enumerate(group.layers)
    }
    if states is not None and spec.state is not None:
        layers |= state_caches(spec.state, states, dtype)
    shapes = [
        AttentionShape(
            num_heads, num_kv_heads, group.shape[-1], BLOCK, len(group.layers), dtype, group.window,
            latent=latent_dims(spec),
        )
        for group in groups
    ]  # fmt: skip
    attentions = [
        TorchAttention(shape) if spec.latent is None else LatentAttention(shape, TorchLatent()) for shape in shapes
    ]
    logits = []
    for parts, sampling in steps:
        plans: list[AttentionPlan | LatentPlan] = [attention.plan(_packed(parts)) for attention in attentions]
        ends = np.cumsum([count for _, _, count in parts]) - 1
        tail = None if sampling is None else Tail(torch.from_numpy(ends[sampling]).long(), None)
        places = [(sequence, start + index) for sequence, start, count in parts for index in range(count)]
        slots = torch.tensor([TABLES[row, place // BLOCK] * BLOCK + place % BLOCK for row, place in places])
        inputs = ForwardInputs(
            token_ids=torch.tensor([(91 * sequence + 7 * place) % 300 for sequence, place in places]),
            positions=torch.tensor([place for _, place in places]),
            slot_mappings=[slots] * len(groups),
            plans=plans,
            tail=tail,
            states=None if states is None else _state_plan(parts),
        )
        logits.append(model.forward(inputs, layers).clone())
    return ServedSteps(logits, caches if states is None else [*caches, states], model.head_ids)


def _state_plan(parts: list[Part]) -> StatePlan:
    """Each sequence has the slot of its number."""
    return state_plan([Chunk(range(count), start, (), sequence) for sequence, start, count in parts])


def _packed(parts: list[Part]) -> PackedSequences:
    counts = np.array([count for _, _, count in parts])
    lengths = np.array([start + count for _, start, count in parts])
    return PackedSequences(
        num_decodes=int((counts == 1).sum()),
        query_starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        seq_lens=torch.from_numpy(lengths.astype(np.int32)),
        block_tables=torch.from_numpy(TABLES[[sequence for sequence, _, _ in parts]].astype(np.int32)),
        host_query_lens=counts,
        host_seq_lens=lengths,
    )
