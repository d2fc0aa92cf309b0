"""The flags of `pd-cluster plan`, in a file of their own so that `--help` imports no simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    machines = parser.add_argument_group("machines and model")
    machines.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of the cluster.")
    machines.add_argument("--gpus-per-host", type=int, default=8, metavar="N", help="Of one host (default: 8).")
    machines.add_argument("--model", default="", metavar="M", help="Name of a packaged table's model, or of --table's.")
    machines.add_argument(
        "--table", action="append", default=[], metavar="FILE",
        help="A file of step-table, one for each number of ranks. Default: the packaged ones of --model.",
    )  # fmt: skip
    machines.add_argument("--tp", type=int, action="append", default=[], metavar="N", help="Only nodes of N ranks.")
    machines.add_argument("--card", default="", metavar="NAME", help="The card, if it is not the table's.")
    load = parser.add_argument_group("load")
    load.add_argument("--trace", default="", metavar="FILE", help="Azure (.csv) or Mooncake (.jsonl) trace.")
    load.add_argument("--rate", type=float, metavar="R", help="Requests a second; with --trace its mean rate.")
    load.add_argument("--in", dest="input_len", default="", metavar="L", help="Prompt tokens: 1024, or 100:4000.")
    load.add_argument("--out", dest="output_len", default="", metavar="L", help="Answer tokens, likewise.")
    load.add_argument("--num-requests", type=int, default=0, metavar="N", help="Default: 2000, or the whole trace.")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="Of arrivals and steps (default: 0).")
    targets = parser.add_argument_group("targets")
    targets.add_argument("--slo-ttft-ms", type=float, default=0.0, metavar="X", help="Of the first token. 0: none.")
    targets.add_argument("--slo-tpot-ms", type=float, default=0.0, metavar="X", help="Of a token of a stream. 0: none.")
    targets.add_argument(
        "--attainment", type=float, default=0.95, metavar="X", help="Share of requests that is enough (default: 0.95)."
    )
    report = parser.add_argument_group("report")
    report.add_argument("--json", default="", metavar="FILE", help="Write what was found; with --check: the plan.")
    report.add_argument("--plot", default="", metavar="FILE", help="Attainment over rate. Needs matplotlib.")
    check = parser.add_argument_group("a running cluster")
    text = "A router; each of several: compare what they do with the plan in --json, and plan nothing."
    check.add_argument("--check", action="append", default=[], metavar="URL", help=text)
    check.add_argument("--minutes", type=float, default=2.0, metavar="M", help="To look at it for (default: 2).")
