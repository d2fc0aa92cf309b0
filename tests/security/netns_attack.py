"""A loopback cluster in one network namespace, a stranger in another, a cable between them. Run as

    unshare -rnm python -m tests.security.netns_attack

Prints as JSON where the cluster listens, and what of it the stranger could connect to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.connectors.remote_node import PATIENT, Node, context, remote_node
from tests.security.handover import NUM_BLOCKS, hand_over, listeners

OURS, THEIRS = "10.77.0.1", "10.77.0.2"

# It runs in the other namespace: says that it is there, waits for its end of the cable, tries every port.
STRANGER = f"""
import json, socket, subprocess, sys
print("there", flush=True)
sys.stdin.readline()
for command in ("link set lo up", "addr add {THEIRS}/24 dev v1", "link set v1 up"):
    subprocess.run(["ip", *command.split()], check=True)
reached = []
for port in json.loads(sys.argv[1]):
    for host in ("{OURS}", "127.0.0.1"):
        try:
            with socket.create_connection((host, port), 2.0) as there:
                there.sendall(b"\\x00\\x10\\x00\\x00\\x00" + b"x" * 64)  # as UCX frames an active message
            reached.append([host, port])
        except ConnectionRefusedError:
            pass
print(json.dumps(reached))
"""


def main() -> int:
    """Entry point."""
    subprocess.run(["mount", "-t", "sysfs", "sys", "/sys"], check=True)  # this namespace's: UCX looks there
    for command in (
        "link set lo up", "link add v0 type veth peer name v1", f"addr add {OURS}/24 dev v0", "link set v0 up",
        "link set v1 up",  # with both ends up UCX takes v0 for a network, unless it is told not to
    ):  # fmt: skip
        subprocess.run(["ip", *command.split()], check=True)
    with remote_node("nixl", context("P", **PATIENT), NUM_BLOCKS) as prefill:
        decode = Node.start("nixl", context("D", **PATIENT), NUM_BLOCKS)
        hand_over(prefill, decode)
        places = sorted(listeners(prefill.pid) | listeners(os.getpid()))
        reached = attack([port for _, port in places])
        hand_over(prefill, decode)
        decode.connector.close()
    sys.stdout.write(json.dumps({"places": places, "reached": reached}) + "\n")
    return 0


def attack(ports: list[int]) -> list[tuple[str, int]]:
    """What the stranger connected to."""
    command = ["unshare", "-n", sys.executable, "-c", STRANGER, json.dumps(ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdin is not None
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "there\n"
        subprocess.run(["ip", "link", "set", "v1", "netns", str(stranger.pid)], check=True)
        out, _ = stranger.communicate("go\n", timeout=60.0)
    found: list[tuple[str, int]] = json.loads(out)
    return found


if __name__ == "__main__":
    sys.exit(main())
