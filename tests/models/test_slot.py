"""Parts of a checkpoint's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch
from safetensors.torch import save_file

from pd_cluster.models.slot import Slot
from pd_cluster.models.weights import load_weights

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.models.model import Model
    from pd_cluster.models.slot import Index

WHOLE = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    ("dim", "start", "length", "index"),
    [
        (0, 0, 4, ()),
        (0, 2, 2, (slice(2, 4),)),
        (1, 3, 3, (slice(None), slice(3, 6))),
    ],
)
def test_a_slot_reads_no_more_than_its_part(dim: int, start: int, length: int, index: Index) -> None:
    part, asked = WHOLE.narrow(dim, start, length), list[object]()

    def read(index: Index) -> torch.Tensor:
        asked.append(index)
        return WHOLE[index].to(torch.bfloat16)

    slot = Slot(torch.empty(part.shape), (4, 6), dim, start)
    slot.fill(read)
    assert asked == [index]
    assert torch.equal(slot.tensor, part)


def test_offsets_are_added_in_the_width_of_the_parameter() -> None:
    norm = Slot(torch.empty(2), (2,), offset=1.0)
    norm.fill(lambda index: torch.tensor([2**-9, -0.5], dtype=torch.bfloat16))
    assert norm.tensor.tolist() == [1 + 2**-9, 0.5], "bfloat16 would have lost the first one"


class TwoRanks:
    """A model in two halves: one of a product's outputs, one of its inputs."""

    def __init__(self, rank: int) -> None:
        self.slots = {
            "up.weight": Slot(torch.empty(2, 6), (4, 6), 0, 2 * rank),
            "down.weight": Slot(torch.empty(4, 3, dtype=torch.bfloat16), (4, 6), 1, 3 * rank),
        }


def test_each_rank_loads_its_part_of_a_file(tmp_path: Path) -> None:
    save_file({"up.weight": WHOLE, "down.weight": WHOLE + 1}, tmp_path / "model.safetensors")
    for rank in range(2):
        model = TwoRanks(rank)
        load_weights(cast("Model", model), tmp_path, False, lambda line: None)
        assert torch.equal(model.slots["up.weight"].tensor, WHOLE[2 * rank : 2 * rank + 2])
        assert torch.equal(model.slots["down.weight"].tensor.float(), WHOLE[:, 3 * rank : 3 * rank + 3] + 1)
