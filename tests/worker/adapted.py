"""Random adapters of a saved model, and what transformers computes with each of them merged into the weights."""

from __future__ import annotations

import queue
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pd_cluster.adapters.adapter_bytes import read_adapter
from pd_cluster.adapters.refused_modules import SERVED_KINDS
from pd_cluster.config import CacheConfig, LoraConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.models.decoder import Decoder
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.deadlines import HANG_S
from tests.models.adapter_files import CONFIG, MAX_BYTES, PREFIX, pair, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pd_cluster.models.linear_part import LinearPart

ALPHA = 3.0
STRENGTH = 0.1  # of each matrix: an adapter changes logits by a twentieth of their deviation and more


@dataclass(frozen=True)
class MadeAdapter:
    """One on disk."""

    path: Path
    digest: str
    changes: Mapping[str, torch.Tensor]  # by module: what is added to its weight

    @contextmanager
    def merged(self, model: Any) -> Iterator[None]:
        """Meanwhile transformers' model has this adapter in its weights."""
        weights = {name: model.get_submodule(name).weight for name in self.changes}
        plain = {name: weight.detach().clone() for name, weight in weights.items()}
        with torch.no_grad():
            for name, weight in weights.items():
                weight += self.changes[name]
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(plain[name])

    @contextmanager
    def hooked(self, model: Any) -> Iterator[None]:
        """Meanwhile transformers' model adds what this adapter gives, and its weights stay."""
        handles = []
        for name, change in self.changes.items():

            def add(module: Any, args: Any, out: torch.Tensor, change: torch.Tensor = change) -> torch.Tensor:
                out += args[0] @ change.T
                return out

            handles.append(model.get_submodule(name).register_forward_hook(add))
        yield
        for handle in handles:
            handle.remove()


def make_adapter(
    directory: Path, parts: Mapping[str, LinearPart], rank: Callable[[str], int], seed: int, max_bytes: int = MAX_BYTES
) -> MadeAdapter:
    """A file with matrices of random numbers for each of the parts, B too."""
    tensors, changes = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    ranks = {name: rank(name) for name in parts}
    for index, (name, part) in enumerate(parts.items()):
        made = pair(name, part.shape, ranks[name], seed=1000 * seed + index)
        tensors |= {key: value * STRENGTH for key, value in made.items()}
        a, b = (tensors[f"{PREFIX}{name}.lora_{letter}.weight"] for letter in "AB")
        changes[name] = ALPHA / ranks[name] * (b @ a)
    config = CONFIG | {"r": 1, "lora_alpha": ALPHA, "target_modules": list(parts), "rank_pattern": ranks}
    path = write(directory, config, tensors)
    return MadeAdapter(path, read_adapter(path, max_bytes).digest, changes)


def config_of(directory: Path, tp: int = 1) -> NodeConfig:
    """A CPU in float32 with three slots of rank 64."""
    return NodeConfig(
        model=ModelConfig(model=str(directory), device="cpu", dtype="float32", tp=tp, num_threads=1),
        cache=CacheConfig(num_blocks=64, block_size=16, swap_gb=0.001),
        lora=LoraConfig(lora_slots=3, max_lora_rank=64),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512),
    )


def start(directory: Path) -> DeviceExecutor:
    return DeviceExecutor.started(config_of(directory), lambda _: None)


def served_parts(executor: DeviceExecutor) -> dict[str, LinearPart]:
    model = executor._weights.model
    assert isinstance(model, Decoder)
    return {name: part for name, part in model.parts.items() if part.kind in SERVED_KINDS}


def load(executor: DeviceExecutor, digest: str, path: Path, num_ranks: int = 1) -> str:
    """Read an adapter on all ranks. -> an error."""
    told = queue.Queue[str]()
    executor.read_adapter(digest, str(path), lambda _, error, num_bytes: told.put(error))
    return max(told.get(timeout=HANG_S) for _ in range(num_ranks))
