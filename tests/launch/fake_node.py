"""A node with a fake engine, as a program: `python -m tests.launch.fake_node [--inherit] FLAGS`.

`--inherit`: on a socket that is open already. $FAKE_ENGINE: see fake_engine.py.
"""

from __future__ import annotations

import os
import socket
import sys

from pd_cluster.errors import StartupError
from pd_cluster.launch import cli, engine_process
from pd_cluster.launch.flags import config_from
from pd_cluster.launch.node_process import run_node
from tests.launch.fake_engine import spawn_fake


def main(arguments: list[str]) -> int:
    """Entry point."""
    engine_process.ENGINE_STOP_S = 0.5 if os.environ["FAKE_ENGINE"] == "stubborn" else 60.0
    if "--inherit" in arguments:
        arguments.remove("--inherit")
        arguments.append(f"--listen-fd={socket.create_server(('127.0.0.1', 0)).detach()}")
    parsed = cli.build_parser().parse_args(["mixed", "--port=0", "--node-id=n", *arguments])
    try:
        return run_node(config_from(parsed), spawn_fake)
    except StartupError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
