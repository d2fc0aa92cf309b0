"""The kernels that each kind of step launches, in order and with their arguments, as files in `goldens`.

A GPU runs the same calls with other functions behind them: a change of a golden is a change of what a GPU computes.
To renew them: `PD_RENEW_GOLDENS=1 pytest tests/models/test_kernel_calls.py`, and read the difference.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
import torch.nn.functional as F

from tests.models.recorded_model import KERNELS, SHAPES, RecordedModel

GOLDENS = Path(__file__).parent / "goldens"
STEPS: dict[str, tuple[int, list[int] | None, bool]] = {
    "3 decodes": (3, None, True),
    "6 decodes": (6, None, True),
    "6 tokens, 2 of which sample": (6, [1, 5], True),
    "6 tokens, 2 of which sample, as captured": (6, [1, 5], False),
    "3 tokens, 1 of which samples": (3, [2], True),
    "6 tokens, none of which samples": (6, [], True),
}


WITHOUT_FEW_ROWS = {("gemma3", "few-rows"), ("float8", "few-rows")}


@pytest.mark.parametrize(
    ("shape", "kernels"), [case for case in product(SHAPES, KERNELS) if case not in WITHOUT_FEW_ROWS]
)
def test_kernels_are_called_as_written_down(monkeypatch: pytest.MonkeyPatch, shape: str, kernels: str) -> None:
    recorded = RecordedModel(shape, KERNELS[kernels])
    monkeypatch.setattr(F, "linear", recorded.recorder.note("linear", F.linear))
    for name, (count, rows, plans_tail) in STEPS.items():
        recorded.recorder.lines.append(f"# {name}")
        recorded.step(count, rows, plans_tail=plans_tail)
    recorded.recorder.lines.append("# choice of products")
    recorded.choose_products()
    found, golden = "\n".join(recorded.recorder.lines) + "\n", GOLDENS / f"{shape}-{kernels}.txt"
    if os.environ.get("PD_RENEW_GOLDENS"):
        golden.write_text(found)
    assert found == golden.read_text()
