"""What `benchmarks/tier.py` measures: its parts, on one engine."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.offline import OfflineEngine, offline_context
from benchmarks.routing_simulation.trace import read_trace
from benchmarks.tier_copies import CopyClock
from benchmarks.tier_streams import OfflineClient
from benchmarks.tier_trace import live_hits, scaled_prompts, simulated_hits
from pd_cluster.engine.core import EngineCore
from pd_cluster.errors import StartupError
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, BlockCopies
from pd_cluster.worker import host_memory
from pd_cluster.worker.host_memory import HostMemory
from pd_cluster.worker.kv_cache import KV_DTYPES
from pd_cluster.worker.step_measurement import StepTimer
from pd_connectors.registry import create_connector

if TYPE_CHECKING:
    import argparse
    import random
    from collections.abc import Callable, Sequence

    from pd_cluster.worker.device_executor import DeviceExecutor
    from pd_cluster.worker.pending_step import PendingStep

# Decodes and prompt tokens of a step, and blocks copied beside it
STEPS_BESIDE = ((0, 2048, (32, 128)), (32, 0, (8, 32)), (1, 0, (8,)))
PIECES_MIB = (64, 16, 256, 1024)
MOST_APART = 0.02  # of the prompts' tokens, a live hit rate and a simulated one
STREAMS = 16
QUIET_TOKENS, BESIDE_TOKENS = 200, 20  # of each stream: without a prompt, and after each one
NUM_PROMPTS = 5
# Counters that have every token in whole blocks of a round's prompts, but for the last one
HITS = {"hit on the device": "prefix_cache_hit_tokens_total", "hit in the host": "host_cache_hit_tokens_total"}


def no_wait(num_bytes: float, *, has_streams: bool) -> float:
    """In place of `HostCopies.load_s`: what is there is loaded, however short. Bounds are the product's."""
    return 0.0


@dataclass(slots=True)
class TierBench:
    """Measures on one engine, the GPU's cache of which is small."""

    engine: OfflineEngine
    namespace: argparse.Namespace
    rng: random.Random
    say: Callable[[str], None]
    rows: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # which the command fails for

    @property
    def executor(self) -> DeviceExecutor:
        return self.engine.executor

    @property
    def block_bytes(self) -> int:
        return self.executor.layout.rank_bytes

    def note(self, name: str, **values: Any) -> None:
        self.rows.append({"name": name, **values})
        self.say(f"{name}: {json.dumps(values, default=str)}")

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        vocabulary = range(self.executor.model.vocab_size)
        return [self.rng.choices(vocabulary, k=length) for length in lengths]

    def restart(self, *, has_tier: bool, role: str = "mixed") -> None:
        """A new core over the same executor, with the tier or without. Nothing is cached."""
        engine, executor = self.engine, self.executor
        engine.core.stop()
        engine.core.run()
        executor.clear()
        config = replace(executor.config, server=replace(executor.config.server, role=role))
        if not has_tier:
            config = replace(config, cache=replace(config.cache, host_cache_gb=0.0))
        engine.mailbox.outbox.clear()
        engine.core = EngineCore(config, executor, create_connector("none", offline_context(executor)), engine.mailbox)

    # copies

    def copies(self) -> None:
        """Steps alone, and beside copies. The device's blocks are the last ones, the host's the first."""
        self.wait_pinned()
        self.restart(has_tier=False)
        clock, most, context = CopyClock(), 256, self.namespace.context
        with clock.installed():
            for way in ("save", "load"):
                for _ in range(3):
                    self.executor.launch(Batch(0, copies=self._some(way, most))).result()
                self.note(f"{way} alone", blocks=most, **clock.take(self.block_bytes))
            for decodes, tokens, counts in STEPS_BESIDE:
                name = f"prompt of {tokens}" if tokens else f"{decodes} x {context} decodes"
                alone = self._steps_ms(decodes, tokens, BlockCopies())
                for count, way in product(counts, ("save", "load")):
                    beside = self._steps_ms(decodes, tokens, self._some(way, count))
                    slower = statistics.median(beside) / statistics.median(alone) - 1
                    self.note(
                        f"{name}, {way} of {count} blocks a step", alone_ms=alone, beside_ms=beside,
                        slower_percent=slower * 100, **clock.take(self.block_bytes),
                    )  # fmt: skip
        self.executor.clear()

    def _some(self, way: str, count: int) -> BlockCopies:
        last = self.executor.slabs.num_blocks(0)
        if way == "save":
            return BlockCopies(save=tuple((0, last - 1 - i, i) for i in range(count)))
        return BlockCopies(load=tuple((0, i, last - 1 - i) for i in range(count)))

    def _steps_ms(self, decodes: int, tokens: int, copies: BlockCopies) -> list[float]:
        executor, context = self.executor, self.namespace.context

        def launch(batch: Batch) -> PendingStep:
            return executor.launch(replace(batch, copies=copies) if batch.chunks else batch)

        model = executor.model
        timer = StepTimer(launch, executor.slabs, executor.block_size, model.max_model_len, model.vocab_size)
        prompts = [tokens] if tokens else []
        return [timer.seconds(decodes, prompts, context=context) * 1e3 for _ in range(2 * self.namespace.repeats)]

    # pinning

    def pinning(self) -> None:
        """Gaps of streams without pinning, while the engine's own memory is pinned, and by size of a piece."""
        client = OfflineClient(self.engine)
        ids = self._streams(client)
        quiet = client.gaps_of(ids, lambda: client.run_tokens(ids, 300))
        self.note("streams, nothing is pinned", **quiet)
        executor, started_s = self.executor, time.perf_counter()
        executor.pin_rest()
        pinned = client.gaps_of(ids, lambda: client.run_while(lambda: not self._is_pinned()))
        gb = executor.num_host_blocks * self.block_bytes / 1e9
        self.note("streams, the engine pins", gb=gb, seconds=time.perf_counter() - started_s, **pinned)
        usual = host_memory.PIECE_BYTES
        for piece in PIECES_MIB:
            host_memory.PIECE_BYTES = piece << 20
            try:
                self._pin_more(client, ids, f"streams, pieces of {piece} MiB")
            finally:
                host_memory.PIECE_BYTES = usual
        client.end(ids)

    def _pin_more(self, client: OfflineClient, ids: list[str], name: str) -> None:
        """Pin memory beside the engine's, and give it back while the streams go on."""
        executor, gb = self.executor, self.namespace.piece_gb
        group = executor.layout.groups[0]
        num_blocks = int(gb * 1e9 / self.block_bytes)
        memory = HostMemory(
            [group.rank_shape(1)], [KV_DTYPES[group.dtype]], num_blocks, executor.cache.tensors[0].device
        )
        started_s = time.perf_counter()
        memory.start()
        gaps = client.gaps_of(ids, lambda: client.run_while(lambda: memory.num_ready < num_blocks))
        taken_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        memory.close()
        self.note(name, gb=gb, seconds=taken_s, unpin_seconds=time.perf_counter() - started_s, **gaps)

    def _is_pinned(self) -> bool:
        thread = self.executor._cache.host._thread
        return thread is None or not thread.is_alive()

    def wait_pinned(self) -> None:
        self.executor.pin_rest()
        while not self._is_pinned():
            time.sleep(0.05)
        host = self.executor._cache.host
        if host.num_ready < host.num_blocks:
            raise StartupError(f"only {host.num_ready} of {host.num_blocks} host blocks could be pinned")

    def _streams(self, client: OfflineClient) -> list[str]:
        ids = [
            client.send(prompt, self.namespace.most_tokens)
            for prompt in self.prompts([self.namespace.context] * STREAMS)
        ]
        client.run_tokens(ids, 20)
        return ids

    # idle

    def idle(self) -> None:
        """Decode and prefill without the tier and with it, in turn."""
        self.wait_pinned()
        context, results = self.namespace.context, dict[str, dict[bool, list[float]]]()

        def keep(name: str, value: float) -> None:
            results.setdefault(name, {False: [], True: []})[has_tier].append(value)

        for repeat in range(self.namespace.repeats):
            for has_tier in (False, True) if repeat % 2 else (True, False):
                self.restart(has_tier=has_tier)
                self._generate(self.prompts([context] * 4), 4)
                for count in (1, 32, 128):
                    prompts = self.prompts([context] * count)
                    self._generate(prompts, 1)
                    self._generate(prompts, 2)
                    seconds = self._generate(prompts, 65) - self._generate(prompts, 1)
                    keep(f"decode {count} x {context}, ms", seconds / 64 * 1e3)
                keep(
                    f"prefill 64 x {context}, tokens/s", 64 * context / self._generate(self.prompts([context] * 64), 1)
                )
                if has_tier:
                    self.say(f"counters: {self._tier_counters()}")
        for name, samples in results.items():
            off, on = (statistics.median(samples[has_tier]) for has_tier in (False, True))
            worse = off / on - 1 if "tokens/s" in name else on / off - 1
            self.note(name, off=samples[False], on=samples[True], worse_percent=worse * 100)

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        return self.engine.generate(prompts, [sampling] * len(prompts)).seconds

    def _tier_counters(self) -> dict[str, float]:
        counters = self.engine.counters()
        return {name: value for name, value in counters.items() if "host" in name or "hit_tokens" in name}

    # hits

    def hits(self) -> None:
        """First tokens and answers of prompts in the host, beside computed ones and hits on the device."""
        self.wait_pinned()
        self.restart(has_tier=True, role="decode")
        size = self.executor.block_size
        self.engine.core._blocks.copies.load_s = no_wait  # type: ignore[method-assign]
        self._spoil()
        client, length = OfflineClient(self.engine), self.namespace.prompt
        client.finish([client.send(prompt, 2) for prompt in self.prompts([length, 100, 1000])])
        prompts = self.prompts([length + 7 * i for i in range(NUM_PROMPTS)])
        answers, num_whole = {}, sum((len(prompt) - 1) // size * size for prompt in prompts)
        for name in ("computed", "hit on the device", "hit in the host"):
            if name == "hit in the host":
                self._evict(client)
            before = self._tier_counters()
            ttfts_ms, answers[name] = self._answers(client, prompts)
            counters = self._since(before)
            self.note(f"TTFT of {length}, {name}", ms=ttfts_ms, p50=statistics.median(ttfts_ms), counters=counters)
            if (counter := HITS.get(name)) and (num_hit := counters[counter]) < num_whole:
                self.faults.append(f"{name}: {num_hit:.0f} of {num_whole} tokens in whole blocks")
        host = answers.pop("hit in the host")
        equal = {name: tokens == host for name, tokens in answers.items()}
        self.note("answers of hits in the host", equal=equal)
        if not equal["hit on the device"]:
            self.faults.append("answers after hits on the device and in the host differ")
        self._evict(client)
        ids = self._streams(client)
        self.note(
            f"{STREAMS} streams, nothing else", **client.gaps_of(ids, lambda: client.run_tokens(ids, QUIET_TOKENS))
        )
        before, beside = self._tier_counters(), list[float]()

        def load() -> None:
            for prompt in prompts:
                beside.extend(self._answers(client, [prompt], 2)[0])
                client.run_tokens(ids, BESIDE_TOKENS)

        gaps = client.gaps_of(ids, load)
        self.note(f"{STREAMS} streams, prompts of {length} load", **gaps, ttft_ms=beside, counters=self._since(before))
        client.end(ids)

    # live

    def live(self) -> None:
        """What is found of a trace, by this engine and by a simulation with its blocks."""
        self.wait_pinned()
        executor, options = self.executor, self.namespace
        requests = read_trace(options.trace)[: options.requests or None]
        prompts = scaled_prompts(requests, options.scale, executor.model.vocab_size)
        num_open, num_host = options.open, executor.num_host_blocks
        simulated = simulated_hits(prompts, num_open, executor.layout.groups, executor.slabs, num_host)
        self._spoil()
        self.restart(has_tier=True, role="prefill")
        began_s = time.perf_counter()
        live = live_hits(prompts, num_open, self.engine)
        self.note(
            f"hits of {options.trace.name}", prompts=len(prompts), tokens=sum(map(len, prompts)), scale=options.scale,
            device_blocks=executor.slabs.num_blocks(0), host_blocks=num_host, open=num_open, live=live[0],
            simulated=simulated[0], live_host=live[1], simulated_host=simulated[1],
            seconds=time.perf_counter() - began_s, counters=self._tier_counters(),
        )  # fmt: skip
        if max(abs(one - other) for one, other in zip(live, simulated, strict=True)) > MOST_APART:
            self.faults.append(f"hits on both tiers and in the host: live {live}, simulated {simulated}")

    def _spoil(self) -> None:
        for tensor in self.executor._cache.hosts:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN in every float format here

    def _since(self, before: dict[str, float]) -> dict[str, float]:
        return {name: value - before.get(name, 0.0) for name, value in self._tier_counters().items()}

    def _answers(
        self, client: OfflineClient, prompts: list[list[int]], num_tokens: int = 32
    ) -> tuple[list[float], list[list[int]]]:
        """Send one prompt after the other. -> milliseconds to the first tokens, and the answers."""
        ttfts_ms, answers = [], []
        for prompt in prompts:
            sent_s = time.perf_counter()
            request = client.send(prompt, num_tokens)
            client.finish([request])
            ttfts_ms.append((client.times[request][0] - sent_s) * 1e3)
            answers.append(client.tokens[request])
        return ttfts_ms, answers

    def _evict(self, client: OfflineClient) -> None:
        """Fill the GPU's cache with other prompts, one after the other: no step takes more than is saved ahead."""
        tokens = self.executor.slabs.num_blocks(0) * self.executor.block_size
        length = min(4096, self.namespace.prompt)
        for prompt in self.prompts([length] * (tokens // length + 3)):
            client.finish([client.send(prompt, 1)])
