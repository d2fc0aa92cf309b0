"""`python -m benchmarks.adapter_kernels`: times of the kernels of adapters (LoRA) on one GPU, by sizes of their tiles.

Products of an 8B model. Each layer has its own adapters, so they come from memory. Calls are captured; times are of one
call, in us, with the time at 4.4 TB/s after a slash. `--warm N I`: only compile every N-th kernel from the I-th on, so
that processes share that work. Parts: kernels, variants, layers, pages.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.kernel_time import seconds_of
from pd_cluster.large_pages import large_pages
from pd_cluster.models.linear import Linear
from pd_cluster.models.linear_adapters import AdapterStep, LinearAdapters
from pd_cluster.worker.host_pages import driver, pin
from pd_kernels import triton_lora
from pd_kernels.lora import NO_TILE, AdapterMatrices, AdapterRows, cut_tiles, most_tiles, tile_rows
from pd_kernels.selection import select_kernels
from pd_kernels.triton_lora import LoraTiling, lora_tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd_kernels.backends import Kernels

HIDDEN, FF, SLOTS, BANDWIDTH = 4096, 14336, 64, 4.4e6  # bytes a us
PRODUCTS = {  # inputs, bounds of the parts
    "qkv": (HIDDEN, (0, 4096, 5120, 6144)), "o": (HIDDEN, (0, HIDDEN)), "gate_up": (HIDDEN, (0, FF, 2 * FF)),
    "down": (FF, (0, HIDDEN)),
}  # fmt: skip
LOADS = ((1, 1), (8, 8), (64, 1), (64, 8), (64, 64), (512, 8), (8192, 1), (8192, 8))  # rows, adapters
SHRINKS = {  # rows of a step -> tilings of the shrink beside the default
    1: [(256, 16, 16, 2), (256, 8, 16, 2), (256, 8, 32, 2), (256, 4, 16, 3), (512, 8, 16, 1)],
    64: [(256, 4, 16, 3), (256, 8, 32, 3), (128, 4, 32, 4), (256, 2, 32, 3)],
    8192: [(128, 2, 64, 3), (64, 1, 64, 4), (64, 2, 128, 4), (64, 4, 64, 4)],
}
EXPANDS = {  # splits and blocks
    1: [(16, 2), (16, 4), (8, 1), (8, 2), (8, 4), (4, 2), (4, 4)], 64: [(4, 2), (4, 3), (4, 8)],
    8192: [(2, 2), (2, 4), (2, 16)],
}  # fmt: skip


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def matrices_of(name: str, rank: int, layers: int) -> list[AdapterMatrices]:
    inputs, bounds = PRODUCTS[name]
    size = (len(bounds) - 1) * inputs + bounds[-1]
    memory = torch.randn(SLOTS, layers * size * rank, dtype=torch.bfloat16, device="cuda") / 64
    ranks = torch.full((SLOTS,), rank, dtype=torch.int32, device="cuda")
    return [AdapterMatrices(memory, ranks, rank, layer * size, inputs, bounds) for layer in range(layers)]


def rows_of(count: int, adapters: int, most: int = 0) -> AdapterRows:
    slots = np.arange(count) * adapters // count
    order, tiles = cut_tiles(slots, count)
    if count <= 256:  # as captured steps have them
        padded = np.full((most_tiles(count, SLOTS), 3), NO_TILE)
        padded[: len(tiles)] = tiles
        tiles = padded
    most = most or tile_rows(count)
    if most > tile_rows(count):  # variants with larger tiles
        ends = [*range(0, count, most), count]
        tiles = np.array([(slots[first], first, end) for first, end in pairwise(ends)])
    places, kept = (torch.from_numpy(one.astype(np.int32)).cuda() for one in (order, tiles))
    return AdapterRows(places, kept, most)


def timed(works: list[Callable[[], object]]) -> float:
    """us of one of the works, which are captured one after another."""
    return seconds_of(works) * 1e6


def bounds_us(name: str, rank: int, count: int, adapters: int) -> tuple[float, float, float]:
    """Of shrink, expand and gated expand."""
    inputs, bounds = PRODUCTS[name]
    a, b, y = adapters * (len(bounds) - 1) * rank * inputs, adapters * rank * bounds[-1], count * bounds[-1]
    found = (a + count * inputs) * 2, (b + 2 * y) * 2, (b + 1.5 * y) * 2
    return found[0] / BANDWIDTH, found[1] / BANDWIDTH, found[2] / BANDWIDTH


def error_of(
    x: torch.Tensor, before: torch.Tensor, after: torch.Tensor, own: AdapterMatrices, slot: int, row: int
) -> float:
    a, b = (one.float() for one in own.of(own.memory[slot], own.max_rank))
    parts = [b[s:e] @ (a[i] @ x[row].float()) for i, (s, e) in enumerate(pairwise(own.bounds))]
    wanted = torch.cat(parts)
    return float((after[row].float() - before[row].float() - wanted).norm() / wanted.norm())


def layers_for(count: int) -> int:
    return 6 if count <= 256 else 2


def measure(
    name: str, rank: int, count: int, adapters: int, tiling: LoraTiling | None, what: str, most: int = 0
) -> str:
    """`what`: s, e, g or several of these: which kernels are timed."""
    vars(triton_lora)["lora_tiling"] = (lambda *_: tiling) if tiling else lora_tiling
    inputs, bounds = PRODUCTS[name]
    layers, rows = matrices_of(name, rank, layers_for(count)), rows_of(count, adapters, most)
    x = torch.randn(count, inputs, dtype=torch.bfloat16, device="cuda")
    y = torch.randn(count, bounds[-1], dtype=torch.bfloat16, device="cuda") / 16  # as large as what is added
    try:
        low, before, gated = triton_lora.shrink(x, layers[0], rows), y.clone(), ""
        if name == "gate_up" and "g" in what:
            out = triton_lora.expand(low, y, layers[0], rows, True)
        triton_lora.expand(low, y, layers[0], rows, False)
        if name == "gate_up" and "g" in what:
            gates = torch.nn.functional.silu(y[:, :FF]) * y[:, FF:]
            gated = f", gated off by {float((out - gates).float().norm() / gates.float().norm()):.0e}"
        at = [0, count // 2, count - 1]
        error = max(error_of(x, before, y, layers[0], row * adapters // count, row) for row in at)
        if Chosen.warm:
            return ""
        limits, found = bounds_us(name, rank, count, adapters), []
        if "s" in what:
            us = timed([partial(triton_lora.shrink, x, own, rows) for own in layers])
            found.append(f"shrink {us:6.1f}/{limits[0]:.1f}")
        if "e" in what:
            us = timed([partial(triton_lora.expand, low, y, own, rows, False) for own in layers])
            found.append(f"expand {us:6.1f}/{limits[1]:.1f}")
        if "g" in what and name == "gate_up":
            us = timed([partial(triton_lora.expand, low, y, own, rows, True) for own in layers])
            found.append(f"gated {us:6.1f}/{limits[2]:.1f}")
        return f"{', '.join(found)}; off by {error:.0e}{gated}"
    except Exception as failure:  # a tiling that does not fit
        return f"failed: {type(failure).__name__} {str(failure)[:150]}"


class Chosen:
    warm: tuple[int, int] | None = None


def kernels() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for rank in (16, 64):
        for count, adapters in LOADS:
            for name in PRODUCTS:
                told = f"rank {rank} rows {count} adapters {adapters} {name:8}"
                yield told, (name, rank, count, adapters, None, "seg")


def variants() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for (count, adapters), rank in product(((8, 8), (1, 1), (64, 64), (8192, 8)), (16, 64)):
        own, default = 1 if count == 8 else count, lora_tiling(count, rank)
        told = f"rank {rank} rows {count} of {adapters}"
        for one, name in product(SHRINKS[own], ("qkv", "down")):
            yield f"{told} {name:8} {one}", (name, rank, count, adapters, LoraTiling(*one, default.blocks), "s")
        for splits, blocks in EXPANDS[own]:
            tiling = default._replace(splits=splits, blocks=blocks)
            for name, what in (("gate_up", "g"), ("o", "e")):
                yield f"{told} {name:8} splits {splits} blocks {blocks}", (name, rank, count, adapters, tiling, what)
    for rank in (16, 64):
        for name in ("qkv", "gate_up"):
            yield f"rank {rank} rows 8192 adapters 8 {name:8} tiles of 128", (name, rank, 8192, 8, None, "seg", 128)


def layers() -> None:
    """What adapters add to a layer's products and norms."""
    triton_lora.lora_tiling = lora_tiling
    device, chosen = torch.device("cuda"), select_kernels(torch.device("cuda"))
    step, num = AdapterStep(device), 4
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    for rank in (16, 64):
        made = {name: matrices_of(name, rank, num) for name in PRODUCTS}
        linears = [
            {
                name: Linear(
                    torch.randn(bounds[-1], inputs, dtype=torch.bfloat16, device=device) / 64, None, chosen,
                    chosen.silu_and_mul if name == "gate_up" else None,
                )
                for name, (inputs, bounds) in PRODUCTS.items()
            }
            for _ in range(num)
        ]  # fmt: skip
        for index, layer in enumerate(linears):
            for name, linear in layer.items():
                product = linear.few_rows_product()
                assert product is not None
                linear.use_few_rows(product, product.max_rows)
                linear.take_adapters(LinearAdapters(step, chosen, made[name][index]))
            if products := layer["gate_up"].gated_products(8192):
                layer["gate_up"].use({8192: products[0]})
        for count, adapters in ((1, 1), (8, 8), (32, 1), (64, 1), (64, 8), (64, 64), (8192, 1), (8192, 8)):
            rows, residual = rows_of(count, adapters), torch.zeros(count, HIDDEN, dtype=torch.bfloat16, device=device)

            told, base = f"layer: rank {rank} rows {count} adapters {adapters}:", 0.0
            for mode in ("base", "adapted"):
                step.rows = None if mode == "base" else rows
                work = partial(run_layers, linears, residual, norm, chosen)
                if Chosen.warm:
                    work()
                    continue
                us = timed([work]) / num
                base = base or us
                told += f" {mode} {us:.1f}" + ("" if mode == "base" else f" (+{us - base:.1f}, {us / base - 1:+.1%})")
            if not Chosen.warm:
                say(told)


def run_layers(linears: list[dict[str, Linear]], residual: torch.Tensor, norm: torch.Tensor, chosen: Kernels) -> None:
    x: Any = chosen.rms_norm(residual, norm, 1e-5)
    for layer in linears:
        attended = layer["qkv"](x)[:, :HIDDEN].contiguous()
        x = layer["o"].add_norm(residual, attended, norm, 1e-5)
        x = layer["down"].add_norm(residual, layer["gate_up"].activated(x), norm, 1e-5)


def pages() -> None:
    """ms of pinning, and of giving back, by size of a piece: the longest of a piece, and the sum for 64 MB."""
    total = 64 << 20
    for megabytes in (1, 2, 4, 16, 64):
        memory = torch.frombuffer(large_pages(total), dtype=torch.uint8)
        memory.zero_()
        found: dict[str, list[float]] = {"pin": [], "unpin": []}
        for kind, times in found.items():
            for start in range(0, total, megabytes << 20):
                began_s, address = time.perf_counter(), memory.data_ptr() + start
                if kind == "pin":
                    pin(address, megabytes << 20)
                else:
                    torch.cuda.check_error(driver().cudaHostUnregister(address))
                times.append((time.perf_counter() - began_s) * 1e3)
        told = ", ".join(f"{kind} longest {max(times):.2f} sum {sum(times):.1f}" for kind, times in found.items())
        say(f"pages: pieces of {megabytes} MB: {told} ms")
    memory = torch.frombuffer(large_pages(total), dtype=torch.uint8)
    memory.zero_()
    pin(memory.data_ptr(), 2 << 20)
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    began_s = time.perf_counter()
    torch.cuda.check_error(driver().cudaHostUnregister(memory.data_ptr()))
    say(f"pages: unpinning beside 50 ms of work took {(time.perf_counter() - began_s) * 1e3:.2f} ms")
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    torch.empty(total, dtype=torch.uint8, pin_memory=True)
    say(f"pages: 64 MB by torch's pin_memory: {(time.perf_counter() - began_s) * 1e3:.1f} ms")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--warm", type=int, nargs=2, metavar=("N", "I"))
    parser.add_argument("--seconds", type=float, default=1e9, help="After these no variant is begun.")
    parser.add_argument("parts", nargs="*", default=["pages", "kernels", "layers", "variants"])
    options, until_s = parser.parse_args(), time.monotonic()
    Chosen.warm, until_s = options.warm, until_s + options.seconds
    for part in options.parts:
        began_s = time.monotonic()
        if part in ("pages", "layers"):
            if not options.warm or (part == "layers" and not options.warm[1]):
                {"pages": pages, "layers": layers}[part]()
        else:
            for index, (told, arguments) in enumerate({"kernels": kernels, "variants": variants}[part]()):
                if options.warm and index % options.warm[0] != options.warm[1]:
                    continue
                if time.monotonic() > until_s:
                    break
                found = measure(*arguments)
                if not options.warm:
                    say(f"{told}: {found}")
        if not options.warm:
            say(f"--- {part}: {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
