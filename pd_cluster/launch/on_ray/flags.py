"""The flags of `pd-cluster ray`, in a file of their own so that `--help` imports nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.launch.up_flags import count

if TYPE_CHECKING:
    import argparse

SCALED = ("prefill", "decode", "mixed", "router")


def add_ray_flags(parser: argparse.ArgumentParser) -> None:
    """`up FILE`, `status`, `scale`, `down`; each stores its name as `ray_command`."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="ray_command")
    up = _add(commands, "up", "Start the cluster that a YAML file describes, and wait until it serves.")
    up.add_argument("file", metavar="FILE", help="For example deploy/ray/cluster.yaml, which describes every setting.")
    status = _add(commands, "status", "Show every process: phase, address, boot epoch, Ray node.")
    status.add_argument("--json", action="store_true", help="Print JSON.")
    scale = _add(commands, "scale", "Change the numbers of processes, and wait until they run.")
    for role in SCALED:
        scale.add_argument(f"--{role}", type=count, metavar="N", help=f"Number of {role} processes.")
    down = _add(commands, "down", "Stop the cluster; its requests have grace_s (from the file) to end.")
    down.add_argument("--now", action="store_true", help="Do not wait for requests or for the controller.")
    for name, command in (("up", up), ("status", status), ("scale", scale), ("down", down)):
        if name != "up":
            command.add_argument("--name", default="pd", help="The cluster's name in its file (default: pd).")
        command.add_argument(
            "--address",
            default="",
            help="Address of the Ray cluster: host:port, or auto on one of its machines. Its token must be in "
            "$RAY_AUTH_TOKEN, the file $RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token. "
            + ("Default: the file's; without one, a Ray on this machine." if name == "up" else "Default: auto."),
        )  # fmt: skip
        if name in ("up", "scale"):
            command.add_argument(
                "--timeout-s", type=float, default=900.0, metavar="S", help="Longest wait (default: 900)."
            )


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text, allow_abbrev=False)
