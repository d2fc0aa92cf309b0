"""The flags of `pd-cluster balance`, in a file of their own so that `--help` does not import it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


BALANCE_READY = "balance asks "  # printed before the routers' addresses


def add_balance_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router", action="append", required=True, metavar="URL",
        help="A router; several times for several with the same nodes. The first that answers gets the orders.",
    )  # fmt: skip
    parser.add_argument("--slo-ttft-ms", type=float, required=True, metavar="X", help="Target of the first token.")
    parser.add_argument("--slo-tpot-ms", type=float, required=True, metavar="X", help="Target of the time per token.")
    parser.add_argument("--dry-run", action="store_true", help="Say what would be done, and give no order.")
    parser.add_argument("--cluster-key-file", default="", metavar="FILE", help="File with the cluster's shared key.")
    parser.add_argument("--tls-ca", default="", metavar="FILE", help="Authorities of https:// routers.")
