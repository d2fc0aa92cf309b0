"""Memory of an adapter on the host: which pieces are pinned, copied and given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from pd_cluster.worker import host_pages
from pd_cluster.worker.host_pages import PIECE_BYTES, AdapterPages
from tests.worker.test_host_memory import FakeDriver

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBERS = 5 * PIECE_BYTES // 4  # of two bytes: two pieces and a half


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    driver = FakeDriver()
    cuda = SimpleNamespace(cudart=lambda: driver, check_error=driver.check, set_device=lambda device: None)
    monkeypatch.setattr(host_pages, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
    monkeypatch.setattr(host_pages, "PAUSE_S", 0.0)
    yield driver
    assert driver.ranges == {}


def test_each_piece_is_pinned_and_copied_by_itself(driver: FakeDriver) -> None:
    pages = AdapterPages(NUMBERS, torch.bfloat16, torch.device("cuda"))
    pages.numbers.copy_(torch.arange(NUMBERS) % 251)
    pages.pin()
    pieces = list(pages.pieces())
    assert driver.ranges == {piece.data_ptr(): piece.nbytes for piece in pieces}
    assert [piece.nbytes for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES // 2]
    assert torch.equal(torch.cat(pieces), pages.numbers)
    pages.pin()  # of the next adapter in this memory: nothing is pinned twice
    assert len(driver.ranges) == 3
    pages.close()


def test_what_was_pinned_before_a_refusal_is_given_back(driver: FakeDriver) -> None:
    driver.most = 2
    pages = AdapterPages(NUMBERS, torch.bfloat16, torch.device("cuda"))
    with pytest.raises(RuntimeError):
        pages.pin()
    assert len(driver.ranges) == 2
    pages.close()
