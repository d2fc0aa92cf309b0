"""The flags of `pd-cluster up`, in a file of their own so that `--help` does not import `up`."""

from __future__ import annotations

import argparse
from dataclasses import fields

from pd_cluster.launch.flags import add_config_flags
from pd_http.settings import add_flags, port_number
from pd_router.config import RouterConfig

POOL_READY = "pool ready on "  # printed by `pd-cluster pool` before its URL
POOL_CONNECTORS = ("lmcache", "mooncake")  # `up` and `pd-cluster pool` can start their servers
MOST_OF_A_ROLE = 1000  # processes of one command or file
# `up` decides these
PER_NODE = frozenset(
    {"host", "port", "listen_fd", "role", "node_id", "advertise_host", "control_port"}
    | {"tls_cert", "tls_key", "tls_ca", "tls_name"}
)

# Settings of the router for which `up` has a flag that the nodes do not get
ROUTER_SETTINGS = frozenset({"route", "prefill_on_decode", "decode_on_prefill", "api_keys", "tls_cert", "tls_key"})
OTHER_ROUTER_SETTINGS = frozenset(item.name for item in fields(RouterConfig)) - ROUTER_SETTINGS


def add_up_flags(parser: argparse.ArgumentParser) -> None:
    """Add the cluster's own flags, then those that every node gets."""
    cluster = parser.add_argument_group("cluster")
    for role, number in (("prefill", 1), ("decode", 1), ("mixed", 0)):
        cluster.add_argument(
            f"--{role}", type=count, default=number, metavar="N", help=f"Number of {role} nodes (default: {number})."
        )
    for role in ("prefill", "decode"):
        cluster.add_argument(
            f"--{role}-tp",
            type=degree,
            metavar="N",
            help=f"Ranks, and GPUs, of each {role} node. Default: that of --tp, which mixed nodes always have.",
        )
        cluster.add_argument(
            f"--{role}-host-cache-gb",
            type=float,
            metavar="GB",
            help=f"Host cache of each {role} node. Default: --host-cache-gb, which mixed nodes always have.",
        )
    cluster.add_argument("--host", default="127.0.0.1", help="Address of the router (default: 127.0.0.1).")
    text = "Port of the router (default: 8000)."
    cluster.add_argument("--port", type=port_number, default=8000, metavar="N", help=text)
    add_flags(cluster, RouterConfig, skip=OTHER_ROUTER_SETTINGS)
    cluster.add_argument(
        "--pool-gb",
        type=float,
        default=1.0,
        metavar="GB",
        help="Memory of the pool of --connector lmcache (default: 1).",
    )
    text = "Let roles of nodes follow the load. Needs --slo-ttft-ms and --slo-tpot-ms, of which it predicts attainment."
    cluster.add_argument("--balance", action="store_true", help=text)
    cluster.add_argument("--quiet", action="store_true", help="Do not show the output of nodes and router.")
    add_config_flags(parser, skip=PER_NODE)


def count(text: str) -> int:
    """argparse type: a number of processes of a role."""
    number = int(text)
    if not 0 <= number <= MOST_OF_A_ROLE:
        raise argparse.ArgumentTypeError(f"must be 0 to {MOST_OF_A_ROLE}, not {text}")
    return number


def degree(text: str) -> int:
    """argparse type: a number of ranks, 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number
