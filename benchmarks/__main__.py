"""`python -m benchmarks NAME [FLAGS]`: imports the module of that name and calls its `main`."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from pd_cluster.engine.process import bound_programs
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE_ERROR = 2
BENCHMARKS = {
    "adapters": "decode, prefill and gaps of streams on a GPU with adapters (LoRA), beside none",
    "engine": "throughput of the engine on CPU beside transformers, in the same run",
    "drafts": "answers of a model with drafts by lookup and without, in turn: equality, acceptance, tokens a second",
    "recorded_answers": "drafts by lookup beside none, where random weights write recorded answers: tokens a second",
    "draft_host": "host time of steps with 64 drafting sequences beside steps without drafts, without a model",
    "draft_cells": "tokens a second with drafts through those without, simulated by an H200's prices",
    "gpu": "the engine on a GPU: decode, prefill and a mixed load beside the device's ceilings",
    "gpu_grammars": "decode steps of a GPU with rows that follow schemas, beside free ones",
    "kernels": "the GPU kernels on an 8B model's shapes beside the device's ceilings",
    "memory": "KV of a model with windows: bytes held and handed over, and streams that fit, by arithmetic",
    "ranks": "frames to the ranks of a node and their acknowledgements, without a model",
    "reduce": "sums over the GPUs of a host with residual and norm, beside NCCL",
    "disagg": "the five workloads of the disaggregation table, and conversations, on a running cluster",
    "handover": "the steps of a handoff from a prefill to a decode node, on a running cluster",
    "router_cost": "CPU of a router for a request, beside other routers in the same sitting",
    "routing_simulation": "routers over simulated nodes: a trace, beside older rules and a bound, or conversations",
    "tier": "the prefix cache's tier in host memory on a GPU: copies beside steps, pinning, hits, and what it costs",
    "tier_simulation": "what a tier in host memory finds again of two traces, simulated on a virtual clock",
    "balance": "roles that follow the load beside fixed ones, simulated on a virtual clock",
    "slo": "targets of streams and the order of prompts, simulated on a virtual clock",
    "soak": "the engine core under random requests, aborts and preemptions, with its invariants checked",
    "grammar_abuse": "ITL of a stream beside clients that send hostile grammars, on a running cluster",
    "structured": "answers under the schemas of JSONSchemaBench, judged, from a running cluster",
    "vectors": "first tokens of chats while texts are embedded, on a running cluster",
    "keys": "first tokens of a quiet API key beside a greedy one, and retries, on a running cluster",
    "router_scale": "a router process beside a thousand nodes: CPU, memory, times of answers and pages",
    "router_feed": "what the feeds of many nodes cost a router, in CPU time and memory",
    "chart": "draw the README's chart from the records",
    "tables": "write a document's performance tables from the records",
    "files_to_open": 'source files behind "P samples the first token and D emits it"',
    "request_path": "files of a node's HTTP side that a chat goes through",
    "vocabulary": "write the tokenizer.json of a published vocabulary, for measurements of grammars",
    "model": "write a model directory of a known shape, for nodes with --load-format dummy",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark. Returns its exit status; 2 for a flag, file or device that must be changed."""
    width = max(map(len, BENCHMARKS))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="benchmarks:\n" + "".join(f"  {name:{width}}  {text}\n" for name, text in BENCHMARKS.items()),
    )
    parser.add_argument("name", metavar="NAME", choices=BENCHMARKS, help="See below.")
    parser.add_argument("flags", metavar="FLAGS", nargs=argparse.REMAINDER, help="`NAME --help` lists them.")
    namespace = parser.parse_args(arguments)
    if namespace.name == "soak":
        bound_programs(os.environ)
    try:
        status: int = import_module(f"benchmarks.{namespace.name}").main(namespace.flags)
    except StartupError as error:
        sys.stderr.write(f"python -m benchmarks {namespace.name}: error: {error}\n")
        return USAGE_ERROR
    return status


if __name__ == "__main__":
    raise SystemExit(main())
