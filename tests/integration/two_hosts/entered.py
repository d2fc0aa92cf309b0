"""`python -m tests.integration.two_hosts.entered NAMESPACE ARGUMENTS`: `pd-cluster ARGUMENTS` on a host of the network.

It enters the host as `ip netns exec` does. The tests' fork server forks it: a node that is executed takes 5 s of CPU
for its imports.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from tests.forked_command import CLI_MODULE, Command

CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
MNT_DETACH = 2


def enter(namespace: str) -> None:
    """Give this process the network of the namespace, its devices in /sys and its host names. It has one thread."""
    with open(f"/run/netns/{namespace}") as there:
        call("setns", there.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS)
    mount("", "/", "none", MS_SLAVE | MS_REC)
    call("umount2", b"/sys", MNT_DETACH)
    mount(namespace, "/sys", "sysfs", 0)
    for path in (Path("/etc/netns") / namespace).iterdir():
        mount(str(path), f"/etc/{path.name}", "none", MS_BIND)


def mount(source: str, target: str, kind: str, flags: int) -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)


def call(name: str, *arguments: object) -> None:
    """A function of libc. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc[name](*arguments):
        raise OSError(ctypes.get_errno(), name)


if __name__ == "__main__":
    enter(sys.argv[1])
    Command(CLI_MODULE, sys.argv[2:], dict(os.environ), os.getcwd(), []).run()
