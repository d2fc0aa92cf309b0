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
    cuda = SimpleNamespace(cudart=lambda: driver, check_error=driver.check, set_device=driver.devices.append)
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


def test_a_thread_that_reuses_or_gives_back_memory_takes_none_of_another_device(driver: FakeDriver) -> None:
    """The first call of a thread without a device opens the first one: some hundred MB, on each rank after 0."""
    own, taken = torch.device("cuda", 1), list[tuple[torch.device, ...]]()
    pages = AdapterPages(NUMBERS, torch.bfloat16, own)
    pages._copied = SimpleNamespace(synchronize=lambda: taken.append(tuple(driver.devices)))  # type: ignore[assignment]
    pages.wait()
    assert taken == [(own,)]
    pages.pin()
    driver.devices.clear()
    pages._copied = None
    pages.close()
    assert driver.devices == [own]
