"""What xdist starts for a worker: it hands its streams to the process that forks the worker, and ends with the worker.

`python -I -S FILE DOOR WORDS`: DOOR is that process's socket. If it has ended, `python WORDS` runs in its place.
"""

import os
import signal
import socket
import sys


def main() -> None:
    path, *words = sys.argv[1:]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a worker decides by itself what an interrupt ends
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.connect(path)
            socket.send_fds(door, [b"w"], [0, 1])
            is_taken = door.recv(1)
        except OSError:
            is_taken = b""
        if not is_taken:
            signal.signal(signal.SIGINT, before)
            os.execv(sys.executable, [sys.executable, *words])
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):  # else xdist would not see the worker end
            os.dup2(nothing, stream)
        door.recv(1)


if __name__ == "__main__":
    main()
