"""`python -m benchmarks tier_simulation`: what tiers in host memory and on disk find again of a trace's prompts.

One prefill node with the engine's own scheduler, block manager and disk tier, on the virtual clock of `slo`: an H200's
steps of 8B, whatever shape it keeps blocks of. Prompts that share blocks of the trace begin with the same text;
the rest of each is its own. Copies to and from host memory take their time beside the steps, and files theirs. Of a
prompt whole blocks before its last token can be found.

With states a prompt ends after its last whole block of the trace and one token. The checkpoint at its end is for the
next turn, which has all of its text: 708 of 829 prompts of the conversation trace that go on from an earlier one begin
where that one's whole blocks end. But the trace does not tell whether two prompts share less than a block, and after a
rest of its own no checkpoint would be found.

hits: share of the prompts' tokens, with those of rests; saved: seconds of prefill, by the step model of the 8B shape.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, cast

from rich.table import Table

from benchmarks.records import append_record
from benchmarks.routing_simulation.trace import BLOCK_TOKENS, SimRequest, read_trace
from benchmarks.shapes import CONFIGS
from benchmarks.slo.device import DenseDevice
from pd_cluster.bench.cli import positive
from pd_cluster.bench.report import report_console
from pd_cluster.engine.disk_tier import DiskTier
from pd_cluster.errors import StartupError
from pd_cluster.models.registry import resolve_spec
from pd_cluster.planning.simulated_node import Rule, SimulatedNode, VirtualTime
from pd_cluster.protocol.messages import AddRequest, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.sequence import Request
from pd_cluster.scheduling.step_model import StepModel
from pd_cluster.worker.disk_cache.disk_cache import DEADLINE_S, BlockName, DiskRead, DiskWritten
from pd_cluster.worker.kv_cache import host_blocks_in
from pd_connectors.protocol.layout import BlockLayout, KVGroup, KVKind
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.worker.disk_cache.disk_cache import DiskCache

RECORD = Path("benchmarks/results/tier_simulation.jsonl")
TRACES = ("dev_mooncake_conv_0-15min.jsonl", "dev_mooncake_synth_first1500.jsonl")
GROUP = KVGroup(KVKind.FULL, tuple(range(32)), (8, 32, 2, 64, 128), "bfloat16", 64)  # 8B: 8 MiB a block
LAYOUT = BlockLayout((GROUP,))
GPU_GIB = 105.0
DISK_GB_S = 3.5  # what four threads digest


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Of one trace and one size of the tier. Shares of the tokens of all prompts."""

    host_gb: float
    disk_gb: float
    hits: float
    host_hits: float
    saved_s: float
    mean_ttft_s: float
    p90_ttft_s: float
    loaded_gb: float
    written_gb: float
    unsaved_blocks: int  # that left the device without a copy


class VirtualDisk:
    """In place of a DiskCache: files are names, and read and written at a rate, each in their order."""

    is_up = True

    def __init__(self, world: VirtualTime, wake: Callable[[], None], num_blocks: int, bytes_s: float) -> None:
        self._world, self._wake, self._num_blocks = world, wake, num_blocks
        self._block_s = GROUP.block_bytes / bytes_s
        self._files: OrderedDict[BlockName, None] = OrderedDict()
        self._writing: set[BlockName] = set()
        self._read_free_s = self._write_free_s = 0.0
        self._events: list[DiskRead | DiskWritten] = []

    def has(self, name: BlockName) -> bool:
        return name in self._files

    def poll(self) -> list[DiskRead | DiskWritten]:
        events, self._events = self._events, []
        return events

    def read(self, read_id: str, names: Sequence[BlockName], buffer: Callable[[int], memoryview]) -> None:
        due_s, landed = self._world.now_s + DEADLINE_S, []
        for name in names:
            end_s = max(self._read_free_s, self._world.now_s) + self._block_s
            landed.append(end_s <= due_s and name in self._files)
            if landed[-1]:
                self._read_free_s = end_s
                self._files.move_to_end(name)
        event = DiskRead(read_id, tuple(landed))
        self._at(self._read_free_s if all(landed) else due_s, event)

    def write(self, name: BlockName, buffer: memoryview) -> bool:
        if name in self._files or name in self._writing:
            return False
        self._writing.add(name)
        self._write_free_s = max(self._write_free_s, self._world.now_s) + self._block_s
        self._at(self._write_free_s, DiskWritten(name, is_stored=True))
        return True

    def _at(self, when_s: float, event: DiskRead | DiskWritten) -> None:
        def tell() -> None:
            if isinstance(event, DiskWritten):
                self._writing.remove(event.name)
                self._files[event.name] = None
                if len(self._files) > self._num_blocks:
                    self._files.popitem(last=False)
            self._events.append(event)
            self._wake()

        self._world.at(when_s, tell)


def simulate_tiers(
    requests: Sequence[SimRequest], host_gb: float, gpu_gib: float, stretch: float, disk_gb: float = 0.0,
    disk_gb_s: float = DISK_GB_S, layout: BlockLayout = LAYOUT,
) -> TierFigures:  # fmt: skip
    """Serve the prompts, `stretch` times slower than they came. `disk_gb`: with one group."""
    slabs = KvSlabs.in_bytes(layout, int(gpu_gib * 2**30))
    num_host = host_blocks_in(host_gb * 1e9, layout, slabs)
    blocks = BlockManager(layout.groups, slabs, num_host_blocks=num_host, host_cache=num_host > 0)
    num_tokens = sum(one.num_tokens for one in requests)
    if blocks.states:
        requests = [replace(one, num_tokens=len(one.blocks) * BLOCK_TOKENS + 1) for one in requests]
    world = VirtualTime(seed=0)
    node = SimulatedNode(world, Rule("tier", shortest=True), DenseDevice(), role="prefill", blocks=blocks)
    scheduler = node.scheduler
    disk = VirtualDisk(world, node.wake, int(disk_gb * 1e9 // GROUP.block_bytes), disk_gb_s * 1e9)
    tier = DiskTier(
        cast("DiskCache", disk), blocks, scheduler, lambda group, block: memoryview(b""), node.model.prefill_s,
        lambda: world.now_s,
    )  # fmt: skip
    if disk_gb:
        node.before_plan = lambda: tier.turn(0, 0)  # no copy takes time there but a step's
    served = [Request.from_message(_message(one, number, stretch)) for number, one in enumerate(requests)]
    waits_s: list[float] = []
    for one in served:
        begin_s, name = one.message.received_s, one.request_id

        def add(one: Request = one) -> None:
            if not disk_gb:
                scheduler.add(one)
            else:
                scheduler.park(one)
                if not tier.start(one, scheduler.fall_back_to_local):
                    scheduler.fall_back_to_local(one)
            node.wake()

        node.on_token[name] = lambda begin_s=begin_s: waits_s.append(world.now_s - begin_s)  # type: ignore[misc]
        world.at(begin_s, add)
    world.run()
    assert len(waits_s) == len(served)
    cached = [one.sequences[0].num_cached_tokens for one in served]
    counters = blocks.host.counters
    waits_s.sort()
    return TierFigures(
        host_gb, disk_gb, sum(cached) / num_tokens, counters.get("host_cache_hit_tokens_total", 0) / num_tokens,
        sum(_saved_s(num, one.num_tokens) for num, one in zip(cached, requests, strict=True)),
        mean(waits_s), waits_s[int(0.9 * len(waits_s))], counters.get("host_cache_loaded_bytes_total", 0) / 1e9,
        counters.get("host_cache_saved_bytes_total", 0) / 1e9,
        int(counters.get("host_cache_evicted_unsaved_blocks_total", 0)),
    )  # fmt: skip


def _saved_s(num_cached: int, num_tokens: int) -> float:
    return PRICES.prefill_s(num_tokens, 0) - PRICES.prefill_s(num_tokens - num_cached, num_cached)


PRICES = StepModel()


def layout_of(shape: str) -> BlockLayout:
    """The blocks of one rank, of 64 tokens in bfloat16."""
    return BlockLayout(resolve_spec(Path(), CONFIGS[shape]).kv_groups(GROUP.block_size, GROUP.dtype))


def _message(one: SimRequest, number: int, stretch: float) -> AddRequest:
    """A prompt of the trace's blocks: each token of one is the block's number; the others are its own."""
    ids = [block for block in one.blocks for _ in range(BLOCK_TOKENS)]
    ids += [(1 << 24) + number] * (one.num_tokens - len(ids))
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    return AddRequest(str(number), ids, sampling, Work.GENERATE, received_s=one.at_s * stretch)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tier_simulation", allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=Path("benchmarks/data"), metavar="DIR", help="Where traces are.")
    parser.add_argument("--traces", nargs="+", default=TRACES, metavar="FILE", help="Mooncake's, in that directory.")
    parser.add_argument(
        "--host-gb", type=float, nargs="+", default=[0, 128, 256, 512], metavar="X", help="Sizes of the tier."
    )
    parser.add_argument("--gpu-gib", type=positive, default=GPU_GIB, metavar="X", help="KV on the GPU (default: 105).")
    parser.add_argument(
        "--stretch", type=positive, default=3.0, metavar="X", help="Arrivals so many times slower (default: 3)."
    )
    parser.add_argument("--shape", choices=tuple(CONFIGS), default="8b", help="Of the blocks (default: 8b).")
    parser.add_argument("--note", default="", metavar="TEXT", help="Written to the record.")
    parser.add_argument("--json", type=Path, default=RECORD, metavar="FILE", help="Lines are appended (%(default)s).")
    parser.add_argument(
        "--disk-gb", type=float, nargs="+", default=[], metavar="X",
        help="Beside the smallest tier in host memory that is not 0, files of this size.",
    )  # fmt: skip
    parser.add_argument(
        "--disk-gb-s", type=positive, default=DISK_GB_S, metavar="X", help="Files are read, and written, so fast (3.5)."
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print a table of each trace, and append a record for each row. Raises StartupError."""
    namespace = _parser().parse_args(arguments)
    layout = layout_of(namespace.shape)
    if namespace.disk_gb and len(layout.groups) > 1:
        raise StartupError(f"files are simulated for shapes with one KV group; {namespace.shape} has several")
    settings = [(host_gb, 0.0) for host_gb in namespace.host_gb]
    settings += [(min(filter(None, namespace.host_gb)), disk_gb) for disk_gb in namespace.disk_gb]
    for name in namespace.traces:
        requests = read_trace(namespace.data / name)
        title = f"{name}, {namespace.shape}, {namespace.gpu_gib:g} GiB on the GPU, stretch {namespace.stretch:g}"
        columns = (
            "host GB",
            "disk GB",
            "hits",
            "of them host",
            "saved s",
            "TTFT mean / p90 s",
            "loaded GB",
            "written GB",
        )
        table = Table(*columns, "unsaved", title=title)
        for host_gb, disk_gb in settings:
            found = simulate_tiers(
                requests, host_gb, namespace.gpu_gib, namespace.stretch, disk_gb, namespace.disk_gb_s, layout
            )
            table.add_row(
                f"{host_gb:g}", f"{disk_gb:g}", f"{found.hits:.1%}", f"{found.host_hits:.1%}", f"{found.saved_s:.0f}",
                f"{found.mean_ttft_s:.2f} / {found.p90_ttft_s:.2f}", f"{found.loaded_gb:.0f}",
                f"{found.written_gb:.0f}", str(found.unsaved_blocks),
            )  # fmt: skip
            fields = {
                "trace": Path(name).stem,
                "shape": namespace.shape,
                "gpu_gib": namespace.gpu_gib,
                "stretch": namespace.stretch,
            }
            fields |= {"disk_gb_s": namespace.disk_gb_s, "note": namespace.note}
            append_record(namespace.json, "tier_simulation", fields | {"figures": asdict(found)})
        report_console().print(table)
        sys.stdout.flush()
    return 0
