"""Flags that benchmarks of a running cluster have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster.bench.cli import positive

if TYPE_CHECKING:
    import argparse


def add_cluster_flags(parser: argparse.ArgumentParser, record: Path) -> None:
    """Add the router's URL, the prompts' source and where lines are appended (default: `record`)."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="The router (default: %(default)s).")
    parser.add_argument("--note", default="", metavar="TEXT", help="Written to the record, e.g. the nodes' flags.")
    parser.add_argument(
        "--vocab-size", type=int, default=128_256, metavar="N", help="Of the model (default: 128256, the 8b shape)."
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seeds prompts and arrival times.")
    parser.add_argument("--timeout-s", type=positive, default=120.0, metavar="X", help="Per request (default: 120).")
    parser.add_argument(
        "--json", type=Path, default=record, metavar="FILE", help="File to which lines are appended (%(default)s)."
    )
