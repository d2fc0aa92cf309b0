"""`python -m benchmarks adapters`: what adapters (LoRA) add to decode steps and prefill, and to gaps while one loads.

Weights and adapters are random, and each adapter changes all products that take one. A decode step's time is as in
`python -m benchmarks gpu`. `--base` starts the engine without slots, for the price of slots that nothing uses. The
shape `tiny` runs on a CPU, for a look at the program itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu_rows import SHAPES
from benchmarks.offline import OfflineEngine
from benchmarks.records import RESULTS, append_record
from pd_cluster.adapters.adapter_bytes import read_adapter
from pd_cluster.adapters.refused_modules import SERVED_KINDS
from pd_cluster.config import CacheConfig, HandoffConfig, LoraConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.models.decoder import Decoder
from pd_cluster.protocol.messages import AddRequest, TokensOut
from pd_cluster.protocol.orders import AdapterLoaded, LoadAdapter
from pd_cluster.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 320,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 2,
}  # fmt: skip
STREAMS, GAP_TOKENS = 32, 300  # while an adapter is loaded
MAX_BYTES = 1 << 34


@dataclass(frozen=True, slots=True)
class AdaptedRow:
    """A measurement: so many sequences of so many tokens, of which the first `num_adapted` have `num_adapters`."""

    kind: str  # decode: ms a step; prefill: tokens a second
    count: int
    length: int
    num_adapters: int
    num_adapted: int

    @property
    def name(self) -> str:
        rows = "" if self.num_adapted in (0, self.count) else f" in {self.num_adapted} of them"
        return f"{self.kind} {self.count} x {self.length}, {self.num_adapters} adapters{rows}"


def rows_of(count: int, length: int) -> list[AdaptedRow]:
    decodes = [AdaptedRow("decode", count, length, num, count if num else 0) for num in (0, 1, 8, 64)]
    few = [AdaptedRow("decode", count, length, 1, 8), AdaptedRow("decode", count, length, 8, 8)]
    one = [AdaptedRow("decode", 1, length, num, num) for num in (0, 1)]
    prefills = [AdaptedRow("prefill", count, length, num, count if num else 0) for num in (0, 1, 64)]
    return [*decodes, *few, *one, *prefills]


class AdapterBench:
    """Measures on one engine."""

    def __init__(self, engine: OfflineEngine, rank: int, num_adapters: int, directory: Path, decoded: int) -> None:
        self.engine, self._rng, self._decoded = engine, random.Random(0), decoded
        self._vocabulary = range(engine.executor.model.vocab_size)
        self.paths = self._write(rank, num_adapters + 1, directory) if num_adapters else {}
        self.digests = list(self.paths)[:num_adapters]
        for digest in self.digests:
            self._load(digest)

    def measure(self, row: AdaptedRow, repeats: int) -> list[float]:
        digests = [self.digests[index * row.num_adapters // row.num_adapted] for index in range(row.num_adapted)]
        adapters = digests + [""] * (row.count - row.num_adapted)
        if row.kind == "prefill":
            self._run(self._prompts(row), 1, adapters)  # lets each adapter have its slot
            rates = (row.count * row.length / self._run(self._prompts(row), 1, adapters) for _ in range(repeats))
            return list(rates)
        prompts = self._prompts(row)
        for num_tokens in (1, 2):
            self._run(prompts, num_tokens, adapters)
        return [
            (self._run(prompts, self._decoded + 1, adapters) - self._run(prompts, 1, adapters)) / self._decoded * 1e3
            for _ in range(repeats)
        ]

    def longest_gap(self, digest: str) -> float:
        """Of streams of the base model, in ms, while an adapter is read and its first request enters. "": none is."""
        mailbox, core = self.engine.mailbox, self.engine.core
        long = SamplingParams(max_tokens=GAP_TOKENS, temperature=0.0, ignore_eos=True)
        for index in range(STREAMS):
            mailbox.inbox.append(AddRequest(f"g{index}{digest}", self._prompt(64), long))
        num_open, num_tokens, last_s, gap_s, has_asked = STREAMS, 0, 0.0, 0.0, False
        while num_open:
            core.turn()
            messages, mailbox.outbox = mailbox.outbox, []
            told = [one for one in messages if isinstance(one, TokensOut) and one.request_id.startswith("g")]
            if told:
                now_s = time.perf_counter()
                num_tokens += len(told)
                if num_tokens > 20 * STREAMS:
                    gap_s = max(gap_s, now_s - last_s)
                last_s = now_s
                num_open -= sum(one.finished for one in told)
            if digest and not has_asked and num_tokens > 50 * STREAMS:
                mailbox.inbox.append(LoadAdapter(digest, str(self.paths[digest])))
                has_asked = True
            if any(isinstance(one, AdapterLoaded) for one in messages):
                mailbox.inbox.append(AddRequest(f"a{digest}", self._prompt(64), long, adapter=digest, salt=digest))
                num_tokens = 50 * STREAMS + 1
        while core.turn():
            mailbox.outbox.clear()
        return gap_s * 1e3

    def _prompt(self, length: int) -> list[int]:
        return self._rng.choices(self._vocabulary, k=length)

    def _prompts(self, row: AdaptedRow) -> list[list[int]]:
        return [self._prompt(row.length) for _ in range(row.count)]

    def _run(self, prompts: list[list[int]], num_tokens: int, adapters: list[str]) -> float:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return self.engine.generate(prompts, [sampling] * len(prompts), adapters=adapters).seconds

    def _load(self, digest: str) -> None:
        mailbox = self.engine.mailbox
        mailbox.inbox.append(LoadAdapter(digest, str(self.paths[digest])))
        while True:
            self.engine.core.turn()
            told = [one for one in mailbox.outbox if isinstance(one, AdapterLoaded)]
            mailbox.outbox.clear()
            if told:
                assert not told[0].error, told[0].error
                return
            mailbox.wait(0.001)

    def _write(self, rank: int, count: int, directory: Path) -> dict[str, Path]:
        """Adapters with the same random weights and different scales. -> path by digest."""
        model = self.engine.executor._weights.model
        assert isinstance(model, Decoder)
        tensors, parts = {}, [(name, part) for name, part in model.parts.items() if part.kind in SERVED_KINDS]
        for name, part in parts:
            for letter, shape in (("A", (rank, part.shape[1])), ("B", (part.shape[0], rank))):
                key = f"base_model.model.{name}.lora_{letter}.weight"
                tensors[key] = (torch.randn(shape) / 64).to(torch.bfloat16)
        weights, found = directory / "weights", dict[str, Path]()
        save_file(tensors, weights)
        names = sorted({name.rpartition(".")[2] for name, _ in parts})
        for index in range(count):
            path = directory / str(index)
            path.mkdir()
            (path / "adapter_model.safetensors").hardlink_to(weights)
            config = {"peft_type": "LORA", "r": rank, "lora_alpha": 1 + index, "target_modules": names}
            (path / "adapter_config.json").write_text(json.dumps(config))
            found[read_adapter(path, MAX_BYTES).digest] = path
        return found


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks adapters", allow_abbrev=False)
    parser.add_argument("--shape", default="8b", choices=[*SHAPES, "tiny"], help="Default: 8b.")
    parser.add_argument("--rank", type=int, default=16, metavar="R", help="Of the adapters (default: 16).")
    parser.add_argument("--max-lora-rank", type=int, default=0, metavar="R", help="A node's flag (default: --rank).")
    parser.add_argument("--lora-slots", type=int, default=64, metavar="N", help="A node's flag (default: 64).")
    parser.add_argument("--count", type=int, default=64, metavar="N", help="Sequences of a row (default: 64).")
    parser.add_argument("--length", type=int, default=1024, metavar="N", help="Tokens of each (default: 1024).")
    parser.add_argument("--decoded", type=int, default=128, metavar="N", help="Steps that are timed (default: 128).")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="A node's flag (default: 1).")
    parser.add_argument("--base", action="store_true", help="Without slots: only rows without adapters.")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="Samples of a row (default: 3).")
    parser.add_argument("--json", type=Path, default=RESULTS / "adapters.jsonl", metavar="FILE", help="%(default)s.")
    return run_adapter_rows(parser.parse_args(arguments))


def run_adapter_rows(namespace: argparse.Namespace) -> int:
    """Returns 0. Raises StartupError."""
    is_tiny, slots = namespace.shape == "tiny", 0 if namespace.base else namespace.lora_slots
    lines = list[str]()

    def hear(text: str) -> None:
        lines.append(text)
        sys.stderr.write(f"{text}\n")

    with tempfile.TemporaryDirectory(prefix="pd-bench-") as root:
        model = Path(root, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY if is_tiny else SHAPES[namespace.shape].config))
        rank = namespace.max_lora_rank or namespace.rank
        config = NodeConfig(
            model=ModelConfig(
                model=str(model), load_format="dummy", dtype="float32" if is_tiny else "bfloat16",
                device="cpu" if is_tiny else "cuda", max_model_len=4096, tp=namespace.tp,
            ),
            cache=CacheConfig(gpu_memory_utilization=0.9, kv_cache_gb=0.2),
            lora=LoraConfig(lora_slots=slots, max_lora_rank=rank, lora_host_gb=64.0),
            scheduler=SchedulerConfig(max_num_seqs=max(64, namespace.count), max_num_batched_tokens=8192),
            handoff=HandoffConfig(connector="none"),
        )  # fmt: skip
        engine, results = OfflineEngine(config, hear), dict[str, Any]()
        try:
            bench = AdapterBench(engine, namespace.rank, slots, Path(root), namespace.decoded)
            for row in rows_of(namespace.count, namespace.length):
                if row.num_adapters > slots or row.num_adapters > row.count or row.num_adapted > row.count:
                    continue
                results[row.name] = bench.measure(row, namespace.repeats)
                sys.stdout.write(f"{row.name}: {statistics.median(results[row.name]):.2f}\n")
            for name, digest in (("none", ""), ("a new", list(bench.paths)[-1] if slots else "")):
                results[f"gap, {name}"] = bench.longest_gap(digest)
                sys.stdout.write(
                    f"longest gap of {STREAMS} streams, {name} adapter: {results[f'gap, {name}']:.1f} ms\n"
                )
        finally:
            engine.close()
    shown = {name: value for name, value in vars(namespace).items() if name != "json"}
    append_record(namespace.json, "adapters", {"flags": shown, "progress": lines, "results": results})
    return 0
