"""The flags of `pd-cluster bench`. A benchmark's modules are imported when it runs."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from pd_cluster.bench.statistics import OBJECTIVES
from pd_cluster.bench.turns import HISTORY
from pd_cluster.bench.workload import Length
from pd_cluster.errors import StartupError


def add_bench_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` and its subcommands to the command line."""
    text = "Measure an OpenAI-compatible endpoint under load."
    bench = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    kinds = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    text = "Open-loop load on an OpenAI-compatible endpoint: TTFT, ITL, TPOT, goodput."
    serve = kinds.add_parser("serve", help=text, description=text, allow_abbrev=False)
    _add_serve_flags(serve)
    serve.set_defaults(run_command=partial(_serve, serve.parse_args([])))


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("target")
    target.add_argument("--url", default="http://127.0.0.1:8000", help="Base URL (default: %(default)s).")
    target.add_argument("--model", default="", help="Model name. Default: the first that the server lists.")
    target.add_argument("--route", choices=("p-first", "d-first"), help="Order that the router should use.")
    target.add_argument("--api-key", default="", metavar="KEY", help="Sent as bearer token.")
    target.add_argument("--timeout-s", type=positive, default=600.0, metavar="X", help="Per request (default: 600).")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--rate",
        type=positive,
        metavar="R",
        help="Poisson arrivals a second, or `inf` (default: 1; conversations 0.1). With a trace: its mean rate.",
    )
    load.add_argument(
        "--num-requests", type=int, default=0, metavar="N", help="Default: 100, the whole trace, or 24 conversations."
    )
    load.add_argument(
        "--input-len", type=length, metavar="N|A:B", help="Tokens. Default: 512; of a turn's new ones 1000:6000."
    )
    load.add_argument("--output-len", type=length, metavar="N|A:B", help="Tokens. Default: 128; of a turn 200:400.")
    load.add_argument("--trace", type=Path, metavar="FILE", help="Azure (.csv) or Mooncake (.jsonl) trace instead.")
    load.add_argument(
        "--trace-scale", type=positive, default=1.0, metavar="X", help="Factor for the lengths of a trace or of turns."
    )
    load.add_argument(
        "--max-output-len", type=int, default=0, metavar="N", help="Caps the trace's outputs (0: no cap)."
    )
    load.add_argument(
        "--max-input-len", type=int, default=0, metavar="N", help="Leaves out the trace's longer prompts (0: none)."
    )
    load.add_argument(
        "--trace-poisson", action="store_true", help="Lengths of the trace with Poisson arrivals at --rate."
    )
    load.add_argument(
        "--workload",
        choices=("random", "edits"),
        default="random",
        help="random: token ids. edits: chats that ask for a file of --input-len with one name changed; answers end by "
        "themselves, at --output-len at the latest.",
    )
    load.add_argument("--prediction", action="store_true", help="Send the file of edits as `prediction`.")
    load.add_argument("--temperature", type=float, default=0.0, metavar="X", help="Default: 0, greedy.")
    load.add_argument(
        "--stop-at-eos", action="store_true", help="Let the model end outputs early. Default: full length."
    )
    load.add_argument(
        "--vocab-size", type=int, default=0, metavar="N", help="Draw token ids below N. Default: ids from /tokenize."
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="Seeds arrivals, lengths and prompts.")
    load.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="Requests before the clock starts (default: 2)."
    )
    _add_turns_flags(parser.add_argument_group("turns"))
    _add_report_flags(parser.add_argument_group("report"))


def _add_turns_flags(turns: argparse._ArgumentGroup) -> None:
    add = turns.add_argument
    add("--turns", type=length, metavar="N|A:B", help="Conversations of so many requests each.")
    add(
        "--at-once",
        type=natural,
        default=0,
        metavar="N",
        help="Closed loop: so many run at once. Default: they arrive.",
    )
    text = "Tokens before the first turn's new ones, and of the last prompt at most (default: 20000:60000)."
    add("--history", type=length, default=HISTORY, metavar="A:B", help=text)
    add("--head-len", type=int, default=8000, metavar="N", help="Tokens of the history in common (default: 8000).")
    add("--num-heads", type=natural, default=1, metavar="N", help="Different heads (default: 1).")
    add("--tool-s", type=seconds, default=1.0, metavar="X", help="Mean pause before a turn, exponential (default: 1).")
    add(
        "--text",
        action="store_true",
        help="Chats with tools, tokenized anew; answers end by themselves. Default: token ids.",
    )
    add("--later-ttft-ms", type=positive, default=1000.0, metavar="X", help="Target of later turns (default: 1000).")
    add("--longest-gap-ms", type=positive, default=50.0, metavar="X", help="Target of each stream (default: 50).")


def _add_report_flags(report: argparse._ArgumentGroup) -> None:
    report.add_argument(
        "--goodput",
        nargs="+",
        type=objective,
        default=[],
        metavar="NAME:MS",
        help=f"Objectives: {', '.join(OBJECTIVES)}.",
    )
    report.add_argument(
        "--slo", nargs="+", type=slo, default=[], metavar="TTFT/TPOT", help="Pairs in ms, e.g. 200/10 400/15."
    )
    report.add_argument("--json", type=Path, metavar="FILE", help="Write the record with the times of every request.")
    report.add_argument("--plot", type=Path, metavar="FILE", help="Write a plot (.png, .svg, .pdf).")


WITHOUT_TURNS: tuple[str, ...] = (
    "trace", "workload", "goodput", "slo", "prediction", "max_input_len", "max_output_len", "trace_poisson"
)  # fmt: skip
OF_TURNS = (
    "at_once", "history", "head_len", "num_heads", "tool_s", "text", "later_ttft_ms", "longest_gap_ms"
)  # fmt: skip


def positive(text: str) -> float:
    """argparse type: a number above 0; `inf` counts."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def natural(text: str) -> int:
    """argparse type: an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def seconds(text: str) -> float:
    """argparse type: a finite number of at least 0."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or more")
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


def _serve(defaults: argparse.Namespace, namespace: argparse.Namespace) -> int:
    """Refuses flags that would do nothing. Raises StartupError."""
    useless = WITHOUT_TURNS if namespace.turns else OF_TURNS
    useless += ("rate",) if namespace.turns and namespace.at_once else ()
    if given := [name for name in useless if getattr(namespace, name) != getattr(defaults, name)]:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        others = "--turns --at-once" if "rate" in given else "--turns"
        raise StartupError(f"{others} goes with none of: {flags}" if namespace.turns else f"{flags}: set --turns too")
    from pd_cluster.bench.serve import run_serve
    from pd_cluster.bench.serve_turns import run_serve_turns

    return run_serve_turns(namespace) if namespace.turns else run_serve(namespace)
