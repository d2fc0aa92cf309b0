"""What is decided about a model on one device before its weights are read."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_cluster.models.directory import model_directory
from pd_cluster.models.shard import WHOLE, Shard
from pd_cluster.models.state_views import state_caches
from pd_cluster.worker.capacity import GPU_BLOCK_SIZE, decide_capacity
from pd_cluster.worker.collectives import GroupReduce
from pd_cluster.worker.cuda_graphs.set_up import capturable
from pd_cluster.worker.grammars import Grammars
from pd_cluster.worker.kernel_selection import attention_by_group
from pd_cluster.worker.kv_cache import DTYPES
from pd_cluster.worker.logits_stages.order import find_stage, refuse_late
from pd_cluster.worker.model_loading import describe_model
from pd_cluster.worker.profiler import Profiler
from pd_cluster.worker.rank_sampler import RankPlace
from pd_connectors.protocol.layout import BlockLayout, KVKind
from pd_kernels.selection import select_kernels
from pd_kernels.values import FEW_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from pd_cluster.config import ModelConfig, NodeConfig
    from pd_cluster.models.reduce import Reduce
    from pd_cluster.worker.executor import ModelDescription
    from pd_cluster.worker.kv_cache import StateViews
    from pd_cluster.worker.logits_stages.stage import LogitsStage
    from pd_cluster.worker.ranks import Ranks
    from pd_kernels.attention import GroupAttention
    from pd_kernels.backends import Kernels

_BLOCK_SIZE_STEP = 16  # tokens; a block holds a whole number of these units of hashing


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The description of the model, and all that was chosen for it on one device."""

    config: NodeConfig  # with the decided capacity
    progress: Callable[[str], None]  # gets lines about the weights, kernels and graphs
    place: RankPlace | None  # None: the only rank
    shard: Shard
    device: torch.device
    model: ModelDescription
    layout: BlockLayout  # of one rank's blocks
    kernels: Kernels
    attentions: tuple[GroupAttention, ...]  # by KV group
    outside_stages: tuple[type[LogitsStage], ...]
    is_budget_measured: bool
    grammars: Grammars
    reduce: Reduce | None  # the sums of the model's products over the ranks
    profiler: Profiler
    owned: ExitStack

    @property
    def most_drafts(self) -> int:
        """Of a sequence in a step. 0: steps have none, see `make_speculation`."""
        limits = self.config.scheduler
        keeps_states = any(group.kind is KVKind.STATE for group in self.layout.groups)
        return 0 if limits.speculation == "none" or keeps_states or self.outside_stages else limits.max_drafts

    @property
    def state_views(self) -> StateViews | None:
        """Of the model's layers; None: no layer keeps a state."""
        spec, dtype = self.model.spec.state, DTYPES[self.model.dtype]
        return None if spec is None else lambda blocks: state_caches(spec, blocks, dtype)

    @classmethod
    def make(cls, config: NodeConfig, progress: Callable[[str], None], place: RankPlace | None = None) -> DevicePlan:
        """Describe and choose. Close `owned` at the end. Raises StartupError, also if there is no device."""
        shard = WHOLE if place is None else place.shard
        device = resolve_device(config.model, shard.rank)
        if device.type == "cpu" and (config.model.num_threads or place):
            torch.set_num_threads(config.model.num_threads or max(1, torch.get_num_threads() // shard.size))
        # First, so that a wrong path ends the start before the weights are read
        outside_stages = tuple(find_stage(path) for path in config.model.logits_stages)
        model = describe_model(config.model, device, progress)
        for path, kind in zip(config.model.logits_stages, outside_stages, strict=True):
            if model.spec.state is not None:
                refuse_late(path, kind)
        shard.kv_heads(model.spec.num_kv_heads)  # raises before attention is chosen
        shard.part(model.spec.num_heads, "attention heads")
        kernels, dtype = select_kernels(device), DTYPES[model.dtype]
        if (state := model.spec.state) and (why := kernels.state.problem(state.key_dim, state.value_dim)):
            raise StartupError(
                f"the kernels for {device} do not compute the states of {model.spec.architecture}: {why}"
            )
        if device.type == "cuda":
            config = replace(config, scheduler=capturable(config.scheduler, model.spec, kernels, progress))
        capacity = decide_capacity(config, model.spec, dtype.itemsize, gpu_bytes(device))
        progress(capacity.line)
        config = capacity.applied_to(config)
        block_size = _resolve_block_size(config.cache.block_size, device)
        layout = BlockLayout(model.spec.kv_groups(block_size, model.kv_dtype), shard.size)
        attentions = attention_by_group(model.spec, layout, dtype, config.model.attention_backend, device, progress)
        with ExitStack() as owned:
            profiler = Profiler(device)
            owned.callback(profiler.stop)
            grammars = Grammars(model_directory(config.model.model), model.vocab_size, model.eos_token_ids)
            owned.callback(grammars.close)
            reduce = _make_reduce(model, place, device, progress)
            return cls(
                config, progress, place, shard, device, model, layout, kernels, attentions, outside_stages,
                capacity.is_budget_measured, grammars, reduce, profiler, owned.pop_all(),
            )  # fmt: skip


def make_place(config: ModelConfig, shard: Shard, store: Store, ranks: Ranks | None = None) -> RankPlace:
    """Join the other ranks. Returns when all have joined. Raises StartupError if there is no device for the rank.

    `ranks`: on rank 0.
    """
    device = resolve_device(config, shard.rank)
    return RankPlace(shard, GroupReduce(shard, store, device, select_kernels(device)), ranks)


def _make_reduce(
    model: ModelDescription, place: RankPlace | None, device: torch.device, progress: Callable[[str], None]
) -> Reduce | None:
    if place is None or device.type == "cpu":
        return None if place is None else place.reduce
    from pd_cluster.worker.symmetric_reduce import start_symmetric_reduce

    spec, dtype = model.spec, DTYPES[model.dtype]
    half_rows = FEW_ROWS[0] if dtype is torch.bfloat16 and not spec.quantization else 0  # as few rows have products
    return start_symmetric_reduce(place.reduce, spec.hidden_size, dtype, device, progress, half_rows)


def resolve_device(config: ModelConfig, rank: int = 0) -> torch.device:
    """The device of a rank, which becomes the current one. Raises StartupError if there is none."""
    name = config.device
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: torch finds no CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if config.tp == 1:
        return torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.device_count() < config.tp:
        raise StartupError(f"--tp {config.tp} needs {config.tp} GPUs; torch finds {torch.cuda.device_count()}")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def gpu_bytes(device: torch.device) -> int:
    """The whole memory of a GPU; 0 for a CPU."""
    return 0 if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]


def _resolve_block_size(wanted: int, device: torch.device) -> int:
    if wanted % _BLOCK_SIZE_STEP or wanted < 0:
        raise StartupError(f"--block-size {wanted} is not a multiple of {_BLOCK_SIZE_STEP}")
    return wanted or (16 if device.type == "cpu" else GPU_BLOCK_SIZE)
