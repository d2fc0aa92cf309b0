"""Soaks the engine core with random requests, aborts, forks and preemptions, and checks its invariants.

    python -m benchmarks soak --seconds 600

The cache is far too small for the load, so that sequences are preempted all the time, by swapping and by recomputing.
The load comes in rounds. After each round the engine finishes all requests. Then

    every request    has ended exactly once, and so has each of its sequences, with an allowed number of tokens
    every block      is free or in the prefix cache, and is counted once
    every logit      of all rows of all steps was finite
    GPU memory       in use is the same as after the first round

With `--host-cache-gb` what leaves the device goes on in host memory, which is filled, and all of it resident from the
start: resident bytes and Python's blocks, in the line of each round, tell what grows beside it. After the last round
the slopes of both after warm-up are told, with their bounds; `--json` records them with a row for each minute. torch
and oneDNN keep as many programs as in a node's engine: `python -m benchmarks` sees to that before it imports torch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch

from benchmarks.model import write_model
from benchmarks.offline import OfflineEngine
from benchmarks.records import append_record
from benchmarks.shapes import CONFIGS
from benchmarks.soak_memory import Footprint, MemoryCurve, MemorySample
from benchmarks.soak_traffic import Breach, Traffic, TrafficLedger
from pd_cluster.config import CacheConfig, HandoffConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.protocol.messages import EngineStats, SilenceAllowed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEMO = "demo"
DRAIN_S = 900.0  # from the last request of a round to the end of all its requests; 300 were too few at a load of 24
SAMPLE_S = 60.0  # memory is looked at so often, and after each round
PATIENCE = 8  # most rounds, beyond the time asked for, until sequences have been preempted in both ways
WARM_UP_SHARE = 1 / 3  # of a soak: a CPU's programs are kept for as many shapes as bounds allow, and the tier is full
ABORTS_A_STEP = 0.02
TIER_PREFIXES = 8  # with a tier in host memory: more than the device has room for
PRESSURE = 6  # caches that the longest usual prompts of all running sequences would fill


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a soak. A size of 0 means the device's default."""

    seconds: float
    round_s: float = 20.0
    seed: int = 0
    shape: str = DEMO  # or one of CONFIGS
    device: str = "auto"
    num_blocks: int = 0
    max_num_seqs: int = 0
    swap_gb: float = 0.0
    host_cache_gb: float = 0.0
    async_scheduling: str = "auto"
    warm_up_s: float = 0.0  # slopes are taken after it; 0: after a share of all
    json: Path | None = None  # a record goes there

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu" and torch.cuda.is_available()

    @property
    def num_running(self) -> int:
        return self.max_num_seqs or (64 if self.on_gpu else 16)

    def node_config(self, directory: str) -> NodeConfig:
        """`directory`: a model without weights; "": the demo model."""
        on_gpu = self.on_gpu
        return NodeConfig(
            model=ModelConfig(
                model=directory, load_format="dummy" if directory else "auto", device=self.device, seed=self.seed
            ),
            cache=CacheConfig(
                num_blocks=self.num_blocks or (256 if on_gpu else 96),
                swap_gb=self.swap_gb or self.host_cache_gb or (0.005 if self.shape == DEMO else 0.15),
                host_cache_gb=self.host_cache_gb,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.num_running, max_num_batched_tokens=2048 if on_gpu else 256,
                async_scheduling=self.async_scheduling,
            ),
            handoff=HandoffConfig(connector="none"),
        )  # fmt: skip


@dataclass(slots=True)
class LogitWatch:
    """Counts steps with a logit that is not finite, without waiting for the device."""

    num_bad: torch.Tensor  # int64 []
    num_steps: int = 0

    def __call__(self, logits: torch.Tensor) -> None:
        self.num_steps += 1
        self.num_bad += ~logits.isfinite().all()

    def check(self) -> None:
        """Waits for the device. Raises Breach."""
        if num_bad := int(self.num_bad):
            raise Breach(f"{num_bad} of {self.num_steps} steps had logits that are not finite")


@dataclass(slots=True)
class Soak:
    """An engine under load."""

    engine: OfflineEngine
    options: Options
    traffic: Traffic
    watch: LogitWatch
    ledger: TrafficLedger
    rng: Random
    num_aborts: int = 0
    footprints: list[Footprint] = field(default_factory=list)
    stats: EngineStats | None = None
    curve: MemoryCurve = field(init=False)
    start_s: float = 0.0

    def __post_init__(self) -> None:
        self.curve = MemoryCurve(self.options.warm_up_s or self.options.seconds * WARM_UP_SHARE)

    @classmethod
    def of(cls, engine: OfflineEngine, options: Options) -> Soak:
        executor, rng = engine.executor, Random(options.seed)
        watch = LogitWatch(torch.zeros((), dtype=torch.int64, device=executor.model.device))
        executor.watch_logits(watch)
        room = executor.slabs.num_blocks(0) * executor.block_size
        longest = min(executor.model.max_model_len, room * 2 // 3)
        usual = min(longest // 3, PRESSURE * room // options.num_running)
        ledger = TrafficLedger(executor.model.vocab_size, executor.model.eos_token_ids)
        num_prefixes = TIER_PREFIXES if options.host_cache_gb else 3
        traffic = Traffic(rng, executor.model.vocab_size, longest, usual, num_prefixes)
        return cls(engine, options, traffic, watch, ledger, rng)

    def run(self, hear: Callable[[str], None]) -> None:
        """Run rounds until the time is up, at least two: the first is the warm-up. Raises Breach."""
        self.start_s = time.monotonic()
        while (
            (num_rounds := len(self.footprints)) < 2
            or time.monotonic() - self.start_s < self.options.seconds
            or (num_rounds < PATIENCE and self._lacking)
        ):
            self._round(min(self.options.round_s, self.options.seconds / 2))
            self._sample(self.footprints[-1])
            hear(self.text(self.curve.samples[-1].elapsed_s))
        hear(self.curve.text())
        if self._lacking:
            raise Breach(f"{self._lacking}; the soak proves nothing")

    @property
    def _lacking(self) -> str:
        """What has not happened that a soak is for."""
        host, (swaps, recomputations) = self.engine.core._blocks.host, self._preemptions
        if self.options.host_cache_gb:  # it has room for all that are swapped
            has_turned = host.num_loaded and host.num_saved > 2 * host.num_blocks
            return "" if swaps and has_turned else "too few swaps, saves and loads"
        return "" if swaps and recomputations else f"too few preemptions (swapped, recomputed): {self._preemptions}"

    @property
    def _preemptions(self) -> tuple[float, float]:
        return self._counter("preemptions_swap_total"), self._counter("preemptions_recompute_total")

    def _sample(self, footprint: Footprint) -> None:
        host = self.engine.core._blocks.host
        sizes = host.num_cached, host.num_saved, host.num_loaded
        elapsed_s = time.monotonic() - self.start_s
        self.curve.samples.append(MemorySample(elapsed_s, footprint, self.ledger.num_ended, *sizes))

    def _sample_when_due(self) -> None:
        last_s = self.curve.samples[-1].elapsed_s if self.curve.samples else 0.0
        if time.monotonic() - self.start_s - last_s >= SAMPLE_S:
            self._sample(Footprint.now())

    def text(self, elapsed_s: float) -> str:
        """A line of progress."""
        last, ledger, (swaps, recomputations) = self.footprints[-1], self.ledger, self._preemptions
        return (
            f"{elapsed_s:6.1f} s: {ledger.num_ended} requests, {ledger.num_tokens} tokens, {self.num_aborts} aborts, "
            f"{swaps:.0f} swaps, {recomputations:.0f} recomputations, "
            f"{self._counter('prefix_cache_hit_tokens_total'):.0f} tokens from the prefix cache, "
            f"{self.watch.num_steps} steps finite, GPU {last.gpu_bytes / 1e6:.3f} MB, "
            f"host peak {last.peak_host_bytes / 1e6:.0f} MB, resident {last.resident_bytes / 1e6:.1f} MB, "
            f"{last.python_blocks} blocks of Python"
            f"{self._tier_text()}"
        )

    def _tier_text(self) -> str:
        if not self.options.host_cache_gb:
            return ""
        host = self.engine.core._blocks.host
        num_blocks = sum(one.num_blocks for one in host.groups)
        return (
            f", host cache {host.num_cached} of {num_blocks} blocks, {host.num_saved} saved, "
            f"{host.num_loaded} loaded, {host.num_hit_tokens} tokens found there"
        )

    def _round(self, seconds: float) -> None:
        """Load, drain, check."""
        limit = self.options.num_running * 3 // 2
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            while len(self.ledger.open) < limit:
                self.engine.mailbox.inbox.append(self.ledger.add(self.traffic.request()))
            if self.rng.random() < ABORTS_A_STEP:
                self.engine.mailbox.inbox.append(self.ledger.abort(self.rng))
                self.num_aborts += 1
            self._turn()
            self._sample_when_due()
        end_s = time.monotonic() + DRAIN_S
        while self._turn() or self.ledger.open:
            self._sample_when_due()
            if time.monotonic() > end_s:
                raise Breach(f"{len(self.ledger.open)} requests have not ended {DRAIN_S:.0f} s after the last one")
        self._check()

    def _turn(self) -> bool:
        is_busy = self.engine.core.turn()
        messages, self.engine.mailbox.outbox = self.engine.mailbox.outbox, []
        for message in messages:
            if isinstance(message, EngineStats):
                self.stats = message
            elif not isinstance(message, SilenceAllowed):
                self.ledger.take(message)
        return is_busy

    def _check(self) -> None:
        try:
            self.engine.core.settle()
        except AssertionError as error:
            raise Breach(f"blocks: {error}") from error
        self._turn()
        stats = self.stats
        if stats is None or stats.num_running or stats.num_waiting or stats.kv.in_use:
            raise Breach(f"an idle engine reports {stats}")
        self.watch.check()
        self.footprints.append(Footprint.now())
        self.footprints[0].check_growth_to(self.footprints[-1])

    def _counter(self, name: str) -> float:
        return 0.0 if self.stats is None else self.stats.counters[name]


def soak(options: Options, hear: Callable[[str], None]) -> None:
    """Build the engine and soak it. Raises Breach, StartupError."""
    with tempfile.TemporaryDirectory(prefix="pd-soak-") as directory:
        if options.shape != DEMO:
            write_model(options.shape, Path(directory))
        engine = OfflineEngine(options.node_config("" if options.shape == DEMO else directory), hear)
    try:
        run = Soak.of(engine, options)
        run.run(hear)
        if options.json is not None:
            config = asdict(options) | {"json": str(options.json)}
            append_record(options.json, "soak", {"config": config, **run.curve.fields})
    finally:
        engine.close()


def main(arguments: Sequence[str]) -> int:
    """Returns 1 after a breach, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description="Soak the engine core.")
    parser.add_argument("--seconds", type=float, default=600.0, help="Duration (default: %(default)s).")
    parser.add_argument("--round-s", type=float, default=20.0, help="Load before each check (%(default)s).")
    parser.add_argument("--seed", type=int, default=0, help="Seeds the load and random weights (%(default)s).")
    parser.add_argument("--shape", choices=(DEMO, *CONFIGS), default=DEMO, help="The model (%(default)s).")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--num-blocks", type=int, default=0, help="Cache blocks. 0: too few for the load.")
    parser.add_argument("--max-num-seqs", type=int, default=0, help="Sequences that run at once. 0: 64; 16 on CPU.")
    parser.add_argument("--swap-gb", type=float, default=0.0, help="Host memory for preempted sequences. 0: for a few.")
    parser.add_argument("--host-cache-gb", type=float, default=0.0, help="A tier in host memory, which has the swaps.")
    parser.add_argument("--async-scheduling", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--warm-up-s", type=float, default=0.0, help="Before slopes are taken. 0: a third.")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="A record is appended to it.")
    options = Options(**vars(parser.parse_args(arguments)))

    def hear(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    try:
        soak(options, hear)
    except Breach as breach:
        hear(f"BREACH: {breach}")
        return 1
    hear("held")
    return 0
