"""A process that forks others, in each of which threads read an adapter's files for the first time, all at once.

Prints how these ended: the numbers of their exit statuses, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path

from pd_cluster.adapters.peft_config import read_config
from pd_cluster.adapters.tensor_table import read_table

PROCESSES, THREADS = 200, 4
CONFIG = json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4, "rank_pattern": {"k": 8}}).encode()
HEADER = json.dumps({"a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}).encode()
TABLE = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)


def read(barrier: threading.Barrier) -> None:
    barrier.wait()
    read_config(CONFIG, Path("adapter_config.json"))
    read_table(memoryview(TABLE), Path("adapter_model.safetensors"))


def main() -> None:
    ends = Counter[int]()
    for _ in range(PROCESSES):
        if (child := os.fork()) == 0:
            sys.setswitchinterval(1e-6)
            barrier = threading.Barrier(THREADS)
            threads = [threading.Thread(target=read, args=(barrier,)) for _ in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            os._exit(0)
        ends[os.waitpid(child, 0)[1]] += 1
    json.dump(ends, sys.stdout)


if __name__ == "__main__":
    main()
