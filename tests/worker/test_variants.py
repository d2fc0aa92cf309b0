"""What Triton compiles, it compiles at start: later it would be some request's second."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("triton", reason="the Triton kernels need triton")

from tests.kernels.forked_module import start_module

if TYPE_CHECKING:
    from pathlib import Path

RUN_S = 240.0

# With all kernels of the other cases, in other sizes
MANY_KERNELS = ("windows", "float8 blocks", "experts", "adapters", "adapters, float8 blocks")


@pytest.mark.parametrize(
    "cases",
    [
        MANY_KERNELS,
        pytest.param(
            ("large", "small", "gemma3", "small, float16", "large, fp8 cache", "adapters, gemma3"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_step_needs_a_kernel_that_the_start_did_not_compile(cases: tuple[str, ...], tmp_path: Path) -> None:
    variants = start_module("tests.worker.variants", tmp_path, *cases)
    variants.wait(RUN_S)
    found = json.loads(variants.output.read_text())
    assert {"_decode_kernel", "_prefill_kernel", "_merge_kernel", "_linear_kernel"} <= set(found["kernels"])
    assert tuple(found["later"]) == cases
    assert not any(found["later"].values()), found["later"]
