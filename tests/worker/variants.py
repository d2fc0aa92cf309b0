"""Print what Triton would compile after a worker's start, as JSON: there should be nothing. No GPU is needed.

Kernels do nothing here; each launch only notes for which variant of its kernel Triton would look. A process of its own:
where the tests run in Triton's interpreter, kernels have no variants.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from pd_cluster.bench.shapes import CONFIGS
from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.engine.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.engine.sampling_params import SamplingParams
from pd_cluster.worker.executor import Executor
from pd_kernels import triton_early
from pd_kernels.backends import BACKENDS, TORCH

if TYPE_CHECKING:
    from pd_kernels.backends import Kernels

NUM_SEQS = 21  # neither a power of two nor right below one
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
SMALL = {**CONFIGS["8b"], "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
WINDOWS = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
           "sliding_window": 100, "max_window_layers": 1}  # fmt: skip


class Variants:
    """Those that were asked for."""

    def __init__(self) -> None:
        self._backend = make_backend(GPUTarget("cuda", 90, 32))
        self._binders: dict[JITFunction[Any], Any] = {}
        self.seen: dict[tuple[str, ...], str] = {}  # variant -> its constants

    def run(self, kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """In place of JITFunction.run."""
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        options |= {"debug": False, "instrumentation_mode": ""}
        bound, specialization, others = self._binders[kernel](*args, **options)
        constants = {name: value for name, value in bound.items() if isinstance(value, int | str)}
        variant = kernel.__name__, str(specialization), str(sorted(others.items()))
        self.seen.setdefault(variant, f"{kernel.__name__} {constants}")


def hopper_kernels() -> Kernels:
    """As a Hopper GPU has them; but what samples gives an id."""
    triton_early.launches_early = lambda device: True
    from pd_kernels import triton_decode  # which takes the name as it is now, as all others do

    triton_decode.num_processors = lambda device: 132
    from pd_kernels.triton_backend import TRITON

    return replace(
        TRITON,
        name="hopper",
        argmax=lambda logits: logits.new_zeros(len(logits), dtype=torch.int64),
        gumbel_sample=TORCH.gumbel_sample,
        truncated_sample=TORCH.truncated_sample,
    )


def start(config: dict[str, Any]) -> Executor:
    """A worker that has warmed up as on a GPU."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        node = NodeConfig(
            model=ModelConfig(model=directory, device="cpu", dtype="bfloat16", load_format="dummy", max_model_len=2048),
            cache=CacheConfig(num_blocks=40, block_size=64),
            scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS, max_num_batched_tokens=1024),
        )
        worker = Executor(node, lambda line: None)
    worker._warm_up_mixed_steps(worker._runner, worker.block_size)
    return worker


def serve(worker: Executor, num_decodes: int, *prompts: tuple[int, int, int]) -> None:
    """One step of decodes and of chunks of `prompts`: (tokens before it, its tokens, those that it lacks)."""
    lengths = [(index % 5 * 64, 1, 0) for index in range(num_decodes)] + list(prompts)
    starts, chunks = [], []
    for seq_id, (begin, size, rest) in enumerate(lengths):
        ids, blocks = (0,) * (begin + size + rest), tuple(range(-(-(begin + size + rest) // 64)))
        starts.append(SequenceStart(seq_id, ids, len(ids), blocks, PARAMS, seq_id))
        chunks.append(SequenceChunk(seq_id, begin, size, num_samples=0 if rest else 1))
    worker.execute(Batch(0, tuple(starts), tuple(chunks)))
    worker.execute(Batch(1, departures=tuple(range(len(lengths)))))


def compiled_later(worker: Executor, variants: Variants) -> list[str]:
    """What steps of all sorts ask for that nothing before them did."""
    known = set(variants.seen)
    for count in range(NUM_SEQS):
        serve(worker, count, (0, 65, 0))
        serve(worker, count, (10, 100, 3))
        serve(worker, max(count - 2, 0), (0, 70, 0), (64, 130, 0), (10, 100, 3))
    for size in (2, 15, 16, 17, 31, 33, 64, 500):
        serve(worker, 0, (0, size, 0))
        serve(worker, 3, (17, size, 0), (0, size, 5))
        serve(worker, size % 3, (1500, size, 5))
    return [text for variant, text in variants.seen.items() if variant not in known]


def main() -> None:
    torch.set_num_threads(1)
    variants, kernels, later = Variants(), hopper_kernels(), {}
    BACKENDS["cpu"] = lambda: kernels
    JITFunction.run = lambda kernel, *args, **options: variants.run(kernel, *args, **options)
    for name, config in {"full": SMALL, "windows": {**SMALL, **WINDOWS}}.items():
        later[name] = compiled_later(start(config), variants)
    json.dump({"kernels": sorted({variant[0] for variant in variants.seen}), "later": later}, sys.stdout)


if __name__ == "__main__":
    main()
