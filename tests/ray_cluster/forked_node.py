"""`python -I -S forked_node.py ROLE FLAGS`: it stands for a node, which the tests' fork server forks.

It has the node's streams and environment, passes signals on, and ends with the node's status. The node ends when this
process does, and this process when its launcher does: each has a lifeline. A router is executed.
"""

import json
import os
import select
import signal
import socket
import sys

MODULE = "pd_cluster.launch.cli"
LIFELINE = "PD_LIFELINE_FD"
RELAY = "PD_TEST_FORK_RELAY"  # the path of the socket of `Relay`
NUMBER = 3  # of the lifeline in the node, after its three streams
MAX_ANSWER_BYTES = 32


def main(arguments: list[str]) -> int:
    """Entry point. Returns the node's exit status."""
    if arguments[0] == "router":
        os.execv(sys.executable, [sys.executable, "-P", "-m", MODULE, *arguments])
    launcher = int(os.environ[LIFELINE])
    ours, theirs = socket.socketpair()
    lifeline, held = os.pipe()
    order = json.dumps([MODULE, arguments, {**os.environ, LIFELINE: str(NUMBER)}, os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as relay, theirs:
        relay.connect(os.environ[RELAY])
        socket.send_fds(relay, [order], [0, 1, 2, lifeline, theirs.fileno()])
    os.close(lifeline)
    _, (pidfd,), _, _ = socket.recv_fds(ours, MAX_ANSWER_BYTES, 1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signal.pidfd_send_signal(pidfd, number))
    ready, _, _ = select.select([ours.fileno(), launcher], [], [])
    if launcher in ready:
        os.close(held)
        return 3
    status = int(ours.recv(MAX_ANSWER_BYTES))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
