"""`python -m benchmarks tier`: the tier of the prefix cache in host memory, on one GPU with random weights.

Parts, each with its own record:

    copies   GB/s of saves and loads, alone and beside steps, and how much longer these steps are
    pinning  the longest gap of 16 streams while memory is pinned, by size of a piece
    idle     decode and prefill with the tier and without, in turn; prefill evicts, so it copies blocks out all the time
    hits     first token of a prompt that lies in the host beside computing it; the longest gap of 16 streams meanwhile;
             answers after hits on the device and in the host, with NaN in every host block that was not written
    live     with `--trace`: what is found of a slice of Mooncake's trace, scaled down, beside a simulation of it; the
             tier begins with NaN here, too. Fails if they differ by more than two points

The command fails if a whole block of a prompt was not found where it had to be, on the device and then in the host, or
if the answers after both differ. Those of the computed prompts are recorded alone: a prompt that is computed at once
sums in another order than its last tokens do after a hit, and in bfloat16 two nearly equal logits may change places.

The GPU's cache is made small, so that prompts leave it soon.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.offline import OfflineEngine
from benchmarks.records import RESULTS, append_record
from benchmarks.shapes import CONFIGS
from benchmarks.tier_bench import TierBench
from pd_cluster.config import CacheConfig, HandoffConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.errors import StartupError
from pd_cluster.worker.device_executor import DeviceExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PARTS = ("copies", "pinning", "idle", "hits")
LIVE = "live"


def main(arguments: Sequence[str]) -> int:
    """Returns 0; 1 if a hit was missed or told another answer. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tier", allow_abbrev=False)
    parser.add_argument(
        "--parts", nargs="+", choices=(*PARTS, LIVE), default=list(PARTS), help=f"Default: all but {LIVE}."
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help=f"Of {LIVE}: Mooncake's JSON lines.")
    parser.add_argument("--scale", type=int, default=32, metavar="N", help=f"Of {LIVE}: prompts' tokens by N (32).")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help=f"Of {LIVE}: the first N (default: all).")
    parser.add_argument("--open", type=int, default=16, metavar="N", help=f"Of {LIVE}: prompts at once (default: 16).")
    parser.add_argument("--block-size", type=int, default=0, metavar="N", help="Tokens (default: the device's).")
    parser.add_argument("--shape", default="8b", help="Default: 8b.")
    parser.add_argument("--device", default="cuda", help="cpu: for tests of this benchmark.")
    parser.add_argument("--num-blocks", type=int, default=2624, metavar="N", help="Of the GPU's cache (default: 2624).")
    parser.add_argument("--host-gb", type=float, default=17.2, metavar="X", help="Of the tier (default: 17.2).")
    parser.add_argument("--piece-gb", type=float, default=2.15, metavar="X", help="Pinned for each size of a piece.")
    parser.add_argument("--prompt", type=int, default=8192, metavar="N", help="Tokens of a prompt that hits.")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="Tokens before streams and decodes.")
    parser.add_argument("--most-tokens", type=int, default=8000, metavar="N", help="Of a stream (default: 8000).")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="Samples (default: 3).")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seeds weights and prompts.")
    parser.add_argument(
        "--json", type=Path, default=RESULTS / "tier.jsonl", metavar="FILE", help="Appended to (%(default)s)."
    )
    namespace = parser.parse_args(arguments)
    if LIVE in namespace.parts and namespace.trace is None:
        raise StartupError(f"--parts {LIVE} needs --trace")
    if namespace.device == "cuda" and not torch.cuda.is_available():
        raise StartupError("torch finds no CUDA device")
    with tempfile.TemporaryDirectory(prefix="pd-bench-") as directory:
        Path(directory, "config.json").write_text(json.dumps(CONFIGS[namespace.shape]), encoding="utf-8")
        return int(bool(measure_tier(node_config(directory, namespace), namespace)))


def node_config(directory: str, namespace: argparse.Namespace) -> NodeConfig:
    """The engine's settings."""
    return NodeConfig(
        model=ModelConfig(
            model=directory, load_format="dummy", dtype="bfloat16", device=namespace.device,
            max_model_len=min(16_384, 16 * namespace.num_blocks), seed=namespace.seed,
        ),
        cache=CacheConfig(
            num_blocks=namespace.num_blocks, block_size=namespace.block_size, host_cache_gb=namespace.host_gb
        ),
        scheduler=SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=2048),
        handoff=HandoffConfig(connector="none"),
    )  # fmt: skip


def measure_tier(config: NodeConfig, namespace: argparse.Namespace) -> list[str]:
    """Run the parts, in the order of PARTS where pinning comes first, and append a record. -> what was wrong."""
    began_s, progress = time.perf_counter(), list[str]()

    def say(text: str) -> None:
        progress.append(text)
        sys.stderr.write(f"{time.perf_counter() - began_s:6.1f} s  {text}\n")
        sys.stderr.flush()

    pin_rest = DeviceExecutor.pin_rest
    DeviceExecutor.pin_rest = lambda _: None  # type: ignore[assignment,method-assign]  # until a part says so
    try:
        engine = OfflineEngine(config, say)
    finally:
        DeviceExecutor.pin_rest = pin_rest  # type: ignore[method-assign]
    bench = TierBench(engine, namespace, random.Random(namespace.seed), say)
    parts: dict[str, Callable[[], None]] = {
        "pinning": bench.pinning,
        "copies": bench.copies,
        "hits": bench.hits,
        "idle": bench.idle,
        LIVE: bench.live,
    }
    try:
        for name, part in parts.items():
            if name in namespace.parts:
                say(f"-- {name}")
                part()
    finally:
        say("close")
        engine.close()
        say("closed")
        fields = {"config": asdict(config), "progress": progress, "seed": namespace.seed, "results": bench.rows}
        append_record(namespace.json, "tier", {**fields, "faults": bench.faults})
    sys.stdout.write(json.dumps(bench.rows, indent=1) + "\n")
    for fault in bench.faults:
        say(f"WRONG: {fault}")
    return bench.faults
