"""Writes the status of a cluster on Ray twice a second, as `pd-cluster ray status --json` does once.

python -m tests.ray_cluster.watch NAME ADDRESS
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict

from pd_cluster.errors import StartupError
from pd_cluster.launch.on_ray.commands import _ask
from pd_cluster.launch.on_ray.connect import connected, find_controller

PERIOD_S = 0.5


def main(name: str, address: str) -> None:
    """Entry point; ends with a signal."""
    over = threading.Event()
    with connected(name, address):
        while not over.wait(PERIOD_S):
            try:
                line = json.dumps(asdict(_ask(find_controller(name).status)))
            except StartupError as error:  # the controller is starting again
                line = str(error)
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
