"""Print what Triton would compile after a worker's start, as JSON: there should be nothing. No GPU is needed.

Arguments: names of CASES.

Kernels do nothing here; each launch only notes for which variant of its kernel Triton would look. A process of its own:
where the tests run in Triton's interpreter, kernels have no variants.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from benchmarks.shapes import CONFIGS
from pd_cluster.config import CacheConfig, LoraConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.models import linear
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker import model_loading
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_cluster.worker.input_batch import InputBatch
from pd_cluster.worker.logits_stages.penalties import PenaltyTables
from pd_cluster.worker.warm_up import run_steps_of_all_kinds
from pd_kernels import launch_sizes, triton_dependent_launch
from pd_kernels.selection import BACKENDS
from pd_kernels.triton_attention import TritonBackend
from tests.worker.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_kernels.backends import Kernels

BLOCK_SIZE = 64
SIZES = {2, 15, 16, 17, 31, 33, 63, 64, 65, 200, 384, 500, 1000, 1100, 1584, 2000}  # some by which kernels are cut
PARAMS = [SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k) for temperature, top_k in
          ((0.0, 0), (1.0, 0), (1.0, 9))] + [
    SamplingParams(max_tokens=1, logit_bias={0: 1.0}), SamplingParams(max_tokens=1, presence_penalty=1.0, logprobs=7),
]  # fmt: skip
WINDOWS = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
           "sliding_window": 100, "max_window_layers": 1}  # fmt: skip

FLOAT8 = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1,
          "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}  # fmt: skip
EXPERTS = {"num_experts": 16, "moe_intermediate_size": 128}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 256, "sliding_window": 100, "sliding_window_pattern": 2}


@dataclass(frozen=True)
class Case:
    """A worker: its model, of few layers and words, and what it may hold."""

    config: dict[str, Any]
    num_seqs: int
    budget: int
    max_len: int
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    most_drafts: int = 0  # of a sequence in a step
    lora_slots: int = 0


CASES = {
    "large": Case(CONFIGS["8b"], 7, 2048, 8192),
    "windows": Case({**CONFIGS["8b"], **WINDOWS}, 21, 2048, 2048),
    "small": Case(CONFIGS["0.6b"], 64, 2048, 8192, most_drafts=16),
    "gemma3": Case({**CONFIGS["0.6b"], **GEMMA3}, 8, 1024, 2048),
    "float8 blocks": Case({**CONFIGS["0.6b"], **FLOAT8}, 16, 256, 1024, most_drafts=5),
    "experts": Case({**CONFIGS["30b-a3b"], **EXPERTS}, 21, 2048, 2048, most_drafts=16),
    "small, float16": Case(CONFIGS["0.6b"], 8, 4096, 2048, "float16"),
    "adapters": Case(CONFIGS["0.6b"], 9, 4096, 4096, most_drafts=5, lora_slots=2),
    "adapters, float8 blocks": Case({**CONFIGS["0.6b"], **FLOAT8}, 16, 256, 1024, lora_slots=2),
    "adapters, gemma3": Case({**CONFIGS["0.6b"], **GEMMA3}, 8, 1024, 2048, lora_slots=2),
    "large, fp8 cache": Case(CONFIGS["8b"], 7, 1024, 8192, kv_cache_dtype="fp8"),
}


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
    """As a Hopper GPU has them."""
    triton_dependent_launch.launches_early = lambda device: True  # type: ignore[assignment]
    # Before any module takes the name
    launch_sizes.num_processors = lambda device: 132  # type: ignore[assignment]
    from pd_kernels.triton_backend import TRITON

    return TRITON


def leave_out_products() -> None:
    """Weights are not filled, nor read: what torch multiplies is of any value, and so are drawn tokens."""
    model_loading.fill_at_random = lambda model, seed: None  # type: ignore[attr-defined]
    linear._packs = lambda dtype: False
    PenaltyTables.note = lambda tables, rows, token_ids: None  # type: ignore[method-assign, assignment]
    InputBatch._note_runs = lambda rows, *of_samples: None  # type: ignore[method-assign]
    F.linear = lambda x, weight, bias: x.new_empty(len(x), len(weight))  # type: ignore[assignment, misc]


def start(case: Case) -> DeviceExecutor:
    """A worker that has warmed up as on a GPU, without graphs, and without the steps that measure the cache's size."""
    config = {**case.config, "num_hidden_layers": 3, "intermediate_size": 1024, "vocab_size": 512}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        node = NodeConfig(
            model=ModelConfig(
                model=directory,
                device="cpu",
                dtype=case.dtype,
                kv_cache_dtype=case.kv_cache_dtype,
                load_format="dummy",
                max_model_len=case.max_len,
            ),
            cache=CacheConfig(num_blocks=case.max_len // BLOCK_SIZE, block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_seqs=case.num_seqs, max_num_batched_tokens=case.budget),
            lora=LoraConfig(lora_slots=case.lora_slots),
        )
        worker = DeviceExecutor.started(node, lambda line: None)
    run_steps_of_all_kinds(worker._runner, case.max_len, node.scheduler, case.most_drafts)
    return worker


def serve(worker: DeviceExecutor, num_decodes: int, *prompts: tuple[int, int, int], drafts: Sequence[int] = ()) -> None:
    """One step of decodes, of decodes with so many `drafts` each, and of chunks of `prompts`.

    prompts: (tokens before it, its tokens, those that it lacks). Beside slots two of three sequences have adapters.
    """
    plain = [(index % 5 * BLOCK_SIZE, 1, 0) for index in range(num_decodes + len(drafts))]
    each = [0] * num_decodes + [*drafts] + [0] * len(prompts)
    starts, chunks = [], []
    for seq_id, ((begin, size, rest), num_drafts) in enumerate(zip([*plain, *prompts], each, strict=True)):
        count = begin + size + rest
        params, blocks = PARAMS[seq_id % len(PARAMS)], tuple(range(-(-(count + num_drafts) // BLOCK_SIZE)))
        slot = worker.config.lora.lora_slots - 1 - seq_id % (worker.config.lora.lora_slots + 1)
        starts.append(SequenceStart(seq_id, (0,) * count, count, table(blocks), params, seq_id, adapter=slot))
        guessed = (0,) * num_drafts
        chunks.append(SequenceChunk(seq_id, begin, size + num_drafts, num_samples=0 if rest else 1, drafts=guessed))
    worker.launch(Batch(0, tuple(starts), tuple(chunks))).result()
    worker.launch(Batch(1, departures=tuple(range(len(each))))).result()


def compiled_later(worker: DeviceExecutor, case: Case, variants: Variants) -> list[str]:
    """What steps of all sorts ask for that nothing before them did."""
    known, most = set(variants.seen), case.num_seqs
    for count in (count for count in (*range(19), 31, 32, 33, 48) if count < most):
        serve(worker, count + 1)
        serve(worker, count, (0, 65, 0))
        serve(worker, count, (10, 100, 3))
        serve(worker, max(count - 2, 0), (0, 70, 0), (64, 130, 0), (10, 100, 3))
    sizes = {3 << power >> 1 for power in range(1, case.budget.bit_length())} | SIZES
    for size in sorted(size for size in sizes if size <= case.budget):
        for begin in (0, 17, 1100, 1600, 3000, 4200):
            if begin + size + 5 <= case.max_len:
                serve(worker, 0, (begin, size, 0))
                serve(worker, min(size % 5, most - 2), (begin, size, 5), (0, 2, 0))
    counts = (1, 2, 3, 8, 13, most - 1, most), (1, 2, 3, 7, 16), (0, 1, 5)
    for num, each, beside in product(*counts):
        if num and each <= case.most_drafts and num * each <= most and num + beside <= most:
            serve(worker, beside, drafts=[each] * num)
            serve(worker, beside, drafts=[1 + index % each for index in range(num)])
            if num + beside < most:
                serve(worker, beside, (0, 65, 0), drafts=[each] * num)
                serve(worker, beside, (10, 100, 3), drafts=[each] * num)
    return [text for variant, text in variants.seen.items() if variant not in known]


def main() -> None:
    torch.set_num_threads(1)
    leave_out_products()
    variants, kernels, later = Variants(), hopper_kernels(), {}
    BACKENDS["cpu"] = lambda: kernels
    TritonBackend.why_not = lambda backend, shape, device: ""  # type: ignore[method-assign, assignment]
    JITFunction.run = lambda kernel, *args, **options: variants.run(kernel, *args, **options)
    names = set[str]()
    for name in sys.argv[1:]:
        case = CASES[name]
        later[name] = compiled_later(start(case), case, variants)
        names.update(variant[0] for variant in variants.seen)
        variants.seen.clear()
    json.dump({"kernels": sorted(names), "later": later}, sys.stdout)


if __name__ == "__main__":
    main()
