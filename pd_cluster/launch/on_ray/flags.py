"""The flags of `pd-cluster ray`. Apart from what it does, so that `--help` imports nothing else."""

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
    up.add_argument("file", metavar="FILE", help="For example deploy/ray/cluster.yaml, which explains every setting.")
    status = _add(commands, "status", "Show every process: phase, address, boot epoch, Ray node.")
    status.add_argument("--json", action="store_true", help="For programs.")
    scale = _add(commands, "scale", "Change how many processes there are, and wait until it is so.")
    for role in SCALED:
        scale.add_argument(f"--{role}", type=count, metavar="N", help=f"So many {role} processes.")
    down = _add(commands, "down", "End the cluster: requests first get grace_s of the file.")
    down.add_argument("--now", action="store_true", help="Wait for nothing; also when the cluster's controller hangs.")
    for name, command in (("up", up), ("status", status), ("scale", scale), ("down", down)):
        if name != "up":
            command.add_argument("--name", default="pd", help="The cluster's name in its file (default: pd).")
        command.add_argument(
            "--address",
            default="",
            help="Of the Ray cluster, host:port or auto, as seen from one of its machines. Needs its token in "
            "$RAY_AUTH_TOKEN, the file $RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token. "
            + ("Default: the file's; without one, a Ray on this machine." if name == "up" else "Default: auto."),
        )  # fmt: skip
        if name in ("up", "scale"):
            command.add_argument(
                "--timeout-s", type=float, default=900.0, metavar="S", help="Wait no longer (default: 900)."
            )


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text, allow_abbrev=False)
