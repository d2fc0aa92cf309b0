"""The flags of `pd-cluster bench`. What a benchmark needs is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pd_cluster.bench.presets import AZURE_FILE, MOONCAKE_FILE, PRESETS
from pd_cluster.bench.shapes import CONFIGS, write_model
from pd_cluster.bench.statistics import OBJECTIVES
from pd_cluster.bench.workload import Length


def add_bench_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Every benchmark is a command of `bench`."""
    text = "Measure: load against an endpoint, or the engine alone."
    bench = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    kinds = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    text = "Open-loop load on an OpenAI-compatible endpoint: TTFT, ITL, TPOT, goodput."
    serve = kinds.add_parser("serve", help=text, description=text, allow_abbrev=False)
    serve.set_defaults(run_command=_serve)
    _add_serve_flags(serve)
    text = "Throughput of the engine on CPU beside transformers, in the same run."
    engine = kinds.add_parser("engine", help=text, description=text, allow_abbrev=False)
    engine.set_defaults(run_command=_engine)
    _add_engine_flags(engine)
    text = "The five workloads of the disaggregation table, on a running cluster."
    disagg = kinds.add_parser("disagg", help=text, description=text, allow_abbrev=False)
    disagg.set_defaults(run_command=_disagg)
    _add_disagg_flags(disagg)
    text = "The steps of a handoff from a prefill to a decode node, on a running cluster."
    handover = kinds.add_parser("handover", help=text, description=text, allow_abbrev=False)
    handover.set_defaults(run_command=_handover)
    _add_handover_flags(handover)
    text = "Write a document's performance tables anew from the records."
    tables = kinds.add_parser("tables", help=text, description=text, allow_abbrev=False)
    tables.set_defaults(run_command=_tables)
    tables.add_argument("document", type=Path, nargs="?", default=Path("README.md"), help="Default: README.md.")
    tables.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"), metavar="DIR", help="Default: %(default)s."
    )
    text = "Write a model directory of a known shape, for nodes with --load-format dummy."
    model = kinds.add_parser("model", help=text, description=text, allow_abbrev=False)
    model.set_defaults(run_command=_model)
    model.add_argument("directory", type=Path, metavar="DIR")
    model.add_argument("--shape", choices=tuple(CONFIGS), default="8b", help="Default: 8b.")


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("target")
    target.add_argument("--url", default="http://127.0.0.1:8000", help="Base URL (default: %(default)s).")
    target.add_argument("--model", default="", help="Model name. Default: the first that the server lists.")
    target.add_argument("--route", choices=("p-first", "d-first"), help="Ask the router for this order.")
    target.add_argument("--api-key", default="", metavar="KEY", help="Sent as bearer token.")
    target.add_argument("--timeout-s", type=positive, default=600.0, metavar="X", help="Per request (default: 600).")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--rate", type=positive, metavar="R", help="Poisson arrivals a second, or `inf`. With a trace: its mean rate."
    )
    load.add_argument("--num-requests", type=int, default=0, metavar="N", help="Default: 100, or the whole trace.")
    load.add_argument(
        "--input-len", type=length, default=Length(512, 512), metavar="N|A:B", help="Tokens (default: 512)."
    )
    load.add_argument(
        "--output-len", type=length, default=Length(128, 128), metavar="N|A:B", help="Tokens (default: 128)."
    )
    load.add_argument("--trace", type=Path, metavar="FILE", help="Azure (.csv) or Mooncake (.jsonl) trace instead.")
    load.add_argument("--trace-scale", type=positive, default=1.0, metavar="X", help="Multiplies the trace's lengths.")
    load.add_argument(
        "--max-output-len", type=int, default=0, metavar="N", help="Caps the trace's outputs (0: no cap)."
    )
    load.add_argument(
        "--max-input-len", type=int, default=0, metavar="N", help="Leaves out the trace's longer prompts (0: none)."
    )
    load.add_argument(
        "--trace-poisson", action="store_true", help="Lengths of the trace, but Poisson arrivals at --rate."
    )
    load.add_argument("--temperature", type=float, default=0.0, metavar="X", help="Default: 0, greedy.")
    load.add_argument(
        "--stop-at-eos", action="store_true", help="Let the model end early; else outputs have full length."
    )
    load.add_argument(
        "--vocab-size", type=int, default=0, metavar="N", help="Draw ids below N. Default: ask /tokenize."
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="Seeds arrivals, lengths and prompts.")
    load.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="Requests before the clock starts (default: 2)."
    )
    report = parser.add_argument_group("report")
    report.add_argument(
        "--goodput",
        nargs="+",
        type=objective,
        default=[],
        metavar="NAME:MS",
        help=f"Objectives: {', '.join(OBJECTIVES)}.",
    )
    report.add_argument(
        "--slo", nargs="+", type=slo, default=[], metavar="TTFT/TPOT", help="Pairs in ms, for example 200/10 400/15."
    )
    report.add_argument("--json", type=Path, metavar="FILE", help="Write everything, every request's times included.")
    report.add_argument("--plot", type=Path, metavar="FILE", help="Write a picture (.png, .svg, .pdf).")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--table", choices=("cpu", "gpu"), default="cpu",
        help="cpu: beside transformers, on a small model. gpu: decode, prefill and a mixed load (default: cpu).",
    )  # fmt: skip
    gpu = parser.add_argument_group("--table gpu")
    gpu.add_argument(
        "--shapes", nargs="+", default=["8b", "0.6b"], metavar="NAME", help="Of 8b and 0.6b (default: both)."
    )
    gpu.add_argument(
        "--rows", nargs="+", default=["decode", "prefill", "prompt", "mixed"], metavar="KIND",
        help="Of decode, prefill, prompt and mixed (default: all).",
    )  # fmt: skip
    gpu.add_argument("--budget", type=int, default=8192, metavar="N", help="Tokens of a step (default: 8192).")
    gpu.add_argument("--async-scheduling", choices=("auto", "on", "off"), default="auto", help="As of a node.")
    gpu.add_argument(
        "--cuda-graphs", action=argparse.BooleanOptionalAction, default=True, help="As of a node (default: on)."
    )
    parser.add_argument("--num-requests", type=int, default=32, metavar="N", help="Default: 32.")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="Tokens (default: 128).")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="Tokens (default: 128).")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="Interleaved; the median counts (default: 3)."
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="Compute threads (default: 1).")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seeds weights and prompts.")
    parser.add_argument("--no-peers", action="store_true", help="Measure the engine only, not transformers.")
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="One line is appended (default: benchmarks/results/engine_cpu.jsonl, or engine_gpu.jsonl).",
    )  # fmt: skip


def _add_disagg_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="The router (default: %(default)s).")
    parser.add_argument(
        "--workloads", nargs="+", choices=tuple(PRESETS), default=list(PRESETS), metavar="NAME",
        help=f"Of {', '.join(PRESETS)} (default: all).",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, default=Path("benchmarks/data"), metavar="DIR",
        help=f"Where {AZURE_FILE} and {MOONCAKE_FILE} are (default: %(default)s).",
    )  # fmt: skip
    parser.add_argument("--setting", default="", metavar="TEXT", help="Default: what the router says, as in 1P1D.")
    parser.add_argument("--note", default="", metavar="TEXT", help="Goes into the record: the nodes' flags, say.")
    parser.add_argument(
        "--vocab-size", type=int, default=128_256, metavar="N", help="Of the model (default: 128256, the 8b shape)."
    )
    parser.add_argument("--scale", type=positive, default=1.0, metavar="X", help="Multiplies lengths, for rehearsals.")
    parser.add_argument("--num-requests", type=int, default=0, metavar="N", help="Fewer of each, for rehearsals.")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seeds arrivals and prompts.")
    parser.add_argument("--timeout-s", type=positive, default=120.0, metavar="X", help="Per request (default: 120).")
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/disagg_gpu.jsonl"), metavar="FILE",
        help="A line is appended per workload (default: %(default)s).",
    )  # fmt: skip


def _add_handover_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="The router (default: %(default)s).")
    parser.add_argument("--route", choices=("p-first", "d-first"), help="Ask the router for this order.")
    parser.add_argument("--tokens", type=int, default=1000, metavar="N", help="Length of a prompt (default: 1000).")
    parser.add_argument("--samples", type=int, default=50, metavar="N", help="Per batch size (default: 50).")
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[0, 32], metavar="N",
        help="Sequences that the decode node runs meanwhile (default: 0 32).",
    )  # fmt: skip
    parser.add_argument("--every-s", type=positive, default=0.15, metavar="X", help="Between samples (default: 0.15).")
    parser.add_argument("--note", default="", metavar="TEXT", help="Goes into the record: the nodes' flags, say.")
    parser.add_argument(
        "--vocab-size", type=int, default=128_256, metavar="N", help="Of the model (default: 128256, the 8b shape)."
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seeds prompts and pauses.")
    parser.add_argument("--timeout-s", type=positive, default=120.0, metavar="X", help="Per request (default: 120).")
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/handover_gpu.jsonl"), metavar="FILE",
        help="A line is appended per batch size (default: %(default)s).",
    )  # fmt: skip


def positive(text: str) -> float:
    """argparse type: a number above 0; `inf` counts."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def length(text: str) -> Length:
    """argparse type: `128` or `100:1024`."""
    try:
        return Length.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write 128, or 100:1024 with the smaller number first") from error


def objective(text: str) -> tuple[str, float]:
    """argparse type: `ttft:200`."""
    name, _, limit = text.partition(":")
    try:
        value = float(limit)
    except ValueError:
        value = 0.0
    if name not in OBJECTIVES or not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME:MILLISECONDS, the name one of {', '.join(OBJECTIVES)}")
    return name, value


def slo(text: str) -> tuple[float, float]:
    """argparse type: `200/10`."""
    ttft, _, tpot = text.partition("/")
    try:
        return positive(ttft), positive(tpot)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write TTFT/TPOT in milliseconds, for example 200/10") from error


def _serve(namespace: argparse.Namespace) -> int:
    from pd_cluster.bench.serve import run_serve

    return run_serve(namespace)


def _disagg(namespace: argparse.Namespace) -> int:
    from pd_cluster.bench.disagg import run_disagg

    return run_disagg(namespace)


def _handover(namespace: argparse.Namespace) -> int:
    from pd_cluster.bench.handover import run_handover

    return run_handover(namespace)


def _tables(namespace: argparse.Namespace) -> int:
    from pd_cluster.bench.tables import run_tables

    return run_tables(namespace)


def _model(namespace: argparse.Namespace) -> int:
    write_model(namespace.shape, namespace.directory)
    sys.stdout.write(f"{namespace.directory}: shape {namespace.shape}, to be served with --load-format dummy\n")
    return 0


def _engine(namespace: argparse.Namespace) -> int:
    if namespace.json is None:
        namespace.json = Path(f"benchmarks/results/engine_{namespace.table}.jsonl")
    if namespace.table == "gpu":
        from pd_cluster.bench.gpu import run_gpu_table

        return run_gpu_table(namespace)
    from pd_cluster.bench.engine import run_engine

    return run_engine(namespace)
