"""The kernels that each kind of step launches, in order and with their arguments, as files in `goldens`.

A GPU runs the same calls with other functions behind them: a change of a golden is a change of what a GPU computes.
To renew them: `PD_RENEW_GOLDENS=1 pytest tests/models/test_kernel_calls.py`, and read the difference.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("shape", "num_tables"), [("llama", 1), ("gemma3", 2)])
def test_angles_are_looked_up_before_the_embeddings(shape: str, num_tables: int) -> None:
    """Attention reads them before it waits, so they must be older than the last ordinary launch before it."""
    recorded = RecordedModel(shape, KERNELS["usual"])
    with Operations() as operations:
        recorded.step(3, None)
    before = operations.names[: operations.names.index("aten.embedding.default")]
    assert before.count("aten.index_select.default") == 2 * num_tables
