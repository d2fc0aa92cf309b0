"""What Triton compiles, it compiles at start: later it would be some request's second."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the Triton kernels need triton")

RUN_S = 240.0


MANY_KERNELS = ("windows", "float8 blocks", "experts")  # with all kernels of the other cases, in other sizes


@pytest.mark.parametrize(
    "cases",
    [
        MANY_KERNELS,
        pytest.param(("large", "small", "gemma3", "small, float16", "large, fp8 cache"), marks=pytest.mark.slow),
    ],
)
def test_no_step_needs_a_kernel_that_the_start_did_not_compile(cases: tuple[str, ...]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.worker.variants", *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"_decode_kernel", "_prefill_kernel", "_merge_kernel", "_linear_kernel"} <= set(found["kernels"])
    assert tuple(found["later"]) == cases
    assert not any(found["later"].values()), found["later"]
