"""The command line. A command's modules are imported when it runs, so `--help` and `router` start without torch.

Exit status: 0 done or stopped on request, 1 failed while running, 2 a flag, file, port or device must be changed.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from pd_cluster import __version__
from pd_cluster.errors import StartupError
from pd_cluster.launch.balance_flags import add_balance_flags
from pd_cluster.launch.command_parser import CommandParser
from pd_cluster.launch.environment import check_texts, open_streams, prepare
from pd_cluster.launch.flags import add_config_flags, config_from
from pd_cluster.launch.up_flags import POOL_CONNECTORS, add_up_flags
from pd_connectors.protocol.errors import HandoffError
from pd_http.settings import add_flags, port_number, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

USAGE_ERROR = 2
_NODES = {
    "prefill": "Run a prefill node: computes prompts and hands their KV cache to decode nodes.",
    "decode": "Run a decode node: receives KV cache and generates tokens.",
    "mixed": "Run a node that prefills and decodes.",
}
_ORDERS = {
    "list": "Show the nodes that the router knows.",
    "add": "Add a node to the router.",
    "remove": "Remove a node that was added; it finishes its requests.",
    "drain": "Send a node no new requests until it restarts or is undrained.",
    "undrain": "Send a drained node requests again.",
    "role": "Change a node's role without a restart; what it has begun is finished.",
    "reset-cache": "Make all nodes forget cached prefixes that nothing uses.",
    "start-profile": "Make all nodes record what their engines do, for two minutes at most.",
    "stop-profile": "Make all nodes write these records to their --profile-dir.",
    "load-adapter": "Give an adapter (LoRA) a name at all nodes; it is below their --lora-dir.",
    "unload-adapter": "Make all nodes forget the name of an adapter; requests that run keep it.",
}
_EPILOG = """\
one machine:       pd-cluster up
several machines:  export PD_CLUSTER_KEY=...   # the same secret on every machine
                   pd-cluster prefill --host 0.0.0.0 --port 8100 --advertise-host 10.0.0.1
                   pd-cluster decode  --host 0.0.0.0 --port 8200 --advertise-host 10.0.0.2
                   pd-cluster router  --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `pd-cluster`. Returns the exit status."""
    open_streams()
    parser = build_parser()
    namespace = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = namespace.run_command
    del namespace.run_command
    is_light = vars(namespace).pop("is_light", False)
    try:
        check_texts(sys.argv)
        if not is_light:
            prepare(os.environ)
        return command(namespace)
    except (StartupError, HandoffError) as error:
        sys.stderr.write(f"pd-cluster: error: {error}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, the shells' convention


def build_parser() -> argparse.ArgumentParser:
    """The parser; each command stores its function as `run_command`."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="pd-cluster",
        description="Serve a language model with prefill and decode on separate nodes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pd-cluster {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_up(commands)
    for role, text in _NODES.items():
        node = _add(commands, role, text, _node)
        node.set_defaults(role=role)
        add_config_flags(node, skip={"role"})
    _add_router(commands)
    _add_picker(commands)
    _add_nodes(commands)
    _add_balance(commands)
    _add_keys(commands)
    _add_pool(commands)
    _add_ray(commands)
    _add_check(commands)
    _add_bench(commands)
    _add_planning(commands)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run_command=run, is_light=name in ("nodes", "keys", "balance"))  # those only send or print
    return parser


def _node(namespace: argparse.Namespace) -> int:
    config = config_from(namespace)
    from pd_cluster.engine.process import spawn_engine
    from pd_cluster.launch import preflight
    from pd_cluster.launch.node_process import run_node

    refuse(
        (
            *preflight.setting_problems(config),
            *preflight.machine_problems(config, preflight.MachineFacts()),
            *preflight.key_problems(config.handoff.cluster_key_file),
            *preflight.tls_problems(config),
        )
    )

    return run_node(config, spawn_engine)


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add_up_flags(_add(commands, "up", "Run a whole cluster on this machine: prefill nodes, decode nodes, router.", _up))


def _up(namespace: argparse.Namespace) -> int:
    from pd_cluster.launch.up import run_up

    return run_up(namespace)


def _add_router(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from pd_router.config import RouterConfig

    add_flags(_add(commands, "router", "Run the router, the address for clients.", _router), RouterConfig)


def _router(namespace: argparse.Namespace) -> int:
    from pd_cluster.launch.lifeline import LIFELINE_ENV, hold_lifeline
    from pd_router.cli import run

    hold_lifeline()
    is_supervised = os.environ.pop(LIFELINE_ENV, None) is not None  # workers of this router follow this process
    return run(namespace, is_supervised=is_supervised)


def _add_picker(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from pd_router.endpoint_picker.config import PickerConfig

    text = "Run the router as an endpoint picker for a gateway (Gateway API's InferencePool)."
    add_flags(_add(commands, "epp", text, _picker), PickerConfig)


def _picker(namespace: argparse.Namespace) -> int:
    from pd_router.endpoint_picker.cli import run

    return run(namespace)


def _add_nodes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "List a router's nodes; add, remove or drain one; give all of them an order."
    actions = _add(commands, "nodes", text, _nodes).add_subparsers(title="actions", metavar="ACTION", required=True)
    for action, what in _ORDERS.items():
        parser = actions.add_parser(action, help=what, description=what, allow_abbrev=False)
        parser.set_defaults(action={"undrain": "resume"}.get(action, action.replace("-", "_")))
        parser.add_argument(
            "--router", default="http://127.0.0.1:8000", metavar="URL", help="The router (default: %(default)s)."
        )
        parser.add_argument(
            "--cluster-key-file", default="", metavar="FILE", help="File with the cluster's shared key."
        )
        parser.add_argument("--tls-ca", default="", metavar="FILE", help="Authorities of an https:// router.")
        if action == "add":
            parser.add_argument("node", metavar="URL", help="The node's base URL.")
            parser.add_argument("--role", required=True, choices=tuple(_NODES), help="Its role.")
        elif action in ("remove", "drain", "undrain", "role"):
            parser.add_argument("node", metavar="NODE", help="The node's id or host:port.")
        if action == "role":
            parser.add_argument("role", choices=tuple(_NODES), help="Its new role.")
            parser.add_argument("--force", action="store_true", help="Even if no node is left that decodes.")
        if action.endswith("-adapter"):
            parser.add_argument("name", metavar="NAME", help="The name that requests give as their model.")
        if action == "load-adapter":
            parser.add_argument("path", metavar="PATH", help="The adapter's directory, below --lora-dir of every node.")
            parser.add_argument("--digest", default="", help="Of its files: nodes with others refuse.")
            parser.add_argument("--in-place", action="store_true", help="In place of the name's present adapter.")
        if action == "drain":
            parser.add_argument(
                "--wait-s", type=float, default=0.0, metavar="X",
                help="Wait up to X s for its requests to end; exit status 1 if some still run (default: 0).",
            )  # fmt: skip


def _nodes(namespace: argparse.Namespace) -> int:
    from pd_cluster.launch.node_commands import run_nodes

    return run_nodes(namespace)


def _add_balance(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add_balance_flags(
        _add(commands, "balance", "Keep the roles of a router's nodes to the load, by targets.", _balance)
    )


def _balance(namespace: argparse.Namespace) -> int:
    from pd_cluster.launch.balance_command import run_balance

    return run_balance(namespace)


def _add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "keys", "Make API keys for the clients of a router (--api-keys).", _keys)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    text = "Print a new key, once, to standard error, and its line for the file to standard output."
    new = actions.add_parser("new", help=text, description=text, allow_abbrev=False)
    new.add_argument("name", metavar="NAME", help="The key's name in logs and metrics.")


def _keys(namespace: argparse.Namespace) -> int:
    from pd_router.admission.api_keys import new_key

    try:
        key, line = new_key(namespace.name)
    except ValueError as error:
        raise StartupError(f"keys new {namespace.name}: {error}") from error
    sys.stderr.write(f"the key, which nothing stores: {key}\n")
    sys.stdout.write(f"{line}\n")
    return 0


def _add_pool(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Run the server of a pool: LMCache's (--connector lmcache) or Mooncake's master (--connector mooncake)."
    parser = _add(commands, "pool", text, _pool)
    parser.add_argument(
        "--connector", choices=POOL_CONNECTORS, default="lmcache", help="The nodes' connector (default: lmcache)."
    )
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on (default: 127.0.0.1).")
    parser.add_argument("--port", type=port_number, metavar="N", help="Port (default: 6500, mooncake: 50051; 0: any).")
    memory = "Memory for blocks (lmcache; default: 4). Mooncake keeps blocks in the nodes: --pool-segment-gb."
    parser.add_argument("--max-gb", type=float, default=4.0, metavar="GB", help=memory)


def _pool(namespace: argparse.Namespace) -> int:
    from pd_cluster.launch.pool import run_pool

    return run_pool(namespace.connector, namespace.host, namespace.port, namespace.max_gb)


def _add_ray(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from pd_cluster.launch.on_ray.flags import add_ray_flags

    add_ray_flags(_add(commands, "ray", "Run a cluster on Ray: up, status, scale, down.", _ray))


def _ray(namespace: argparse.Namespace) -> int:
    from pd_cluster.launch.on_ray.commands import run_ray

    return run_ray(namespace)


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Check this machine before starting a node with these flags: packages, devices, transfer, ports, key, model."
    parser = _add(commands, "check", text, _check)
    text = "Port to check, beside --control-port; may be given several times (default: 8000)."
    parser.add_argument("--port", dest="ports", type=port_number, action="append", metavar="N", help=text)
    text = "Do not check the model: for a node that would download it at its start."
    parser.add_argument("--skip-model", action="store_true", help=text)
    text = "Only serve memory for a --read-link elsewhere, until standard input ends. Prints one line for its FILE."
    parser.add_argument("--offer-link", action="store_true", help=text)
    text = "Measure the transfer from elsewhere. FILE has the line that --offer-link printed there."
    parser.add_argument("--read-link", default="", metavar="FILE", help=text)
    add_config_flags(parser, skip={"port", "listen_fd"})


def _check(namespace: argparse.Namespace) -> int:
    from pd_cluster.launch.check import run_check

    return run_check(namespace)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from pd_cluster.bench.cli import add_bench_commands

    add_bench_commands(commands)


def _add_planning(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from pd_cluster.config import HandoffConfig, ServerConfig
    from pd_cluster.planning.flags import add_plan_flags

    add_plan_flags(_add(commands, "plan", "Find how many nodes of each role a load needs, without a GPU.", _plan))
    parser = _add(commands, "step-table", "Measure a model's steps on this machine, for `plan`.", _step_table)
    parser.add_argument("--out", required=True, metavar="FILE", help="File for the table.")
    skipped = (*fields(HandoffConfig), *fields(ServerConfig))
    add_config_flags(parser, skip={item.name for item in skipped})


def _plan(namespace: argparse.Namespace) -> int:
    from pd_cluster.planning.plan import run_plan

    return run_plan(namespace)


def _step_table(namespace: argparse.Namespace) -> int:
    from pd_cluster.launch.step_table import run_step_table

    return run_step_table(namespace)


if __name__ == "__main__":
    sys.exit(main())
