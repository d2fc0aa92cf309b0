"""Writes the status of a cluster on Ray twice a second, as `pd-cluster ray status --json` does once.

python -m tests.ray_cluster.watch NAME ADDRESS
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from pd_cluster.errors import StartupError
from pd_cluster.launch.on_ray.commands import _ask
from pd_cluster.launch.on_ray.connect import connected, find_controller

PERIOD_S = 0.5


def main(name: str, address: str) -> None:
    """Entry point; ends with a signal."""
    with connected(name, address):
        while True:
            try:
                line = json.dumps(asdict(_ask(find_controller(name).status)))
            except StartupError as error:  # the controller is starting again
                line = str(error)
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            time.sleep(PERIOD_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
