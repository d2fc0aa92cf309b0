"""Memory that NIXL reads fast, beside a driver and an allocator that are no GPU's."""

from __future__ import annotations

import contextlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from pd_cluster.launch.check import Verdict, check_memory
from pd_cluster.worker import plain_memory as module
from pd_cluster.worker.plain_memory import plain_memory, without_segments
from pd_connectors.nixl.gpu_memory import IS_LEGACY_CUDA_IPC_CAPABLE, is_readable, refuse_mapped
from pd_connectors.protocol.errors import ConnectorUnavailable

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator

GPU = torch.device("cuda", 0)
PLAIN, MAPPED, UNKNOWN = 0x1000, 0x2000, 0x3000


class FakeDriver:
    """Knows two pointers. Like CUDA's, it writes its answer behind a reference and returns a status."""

    def cuPointerGetAttribute(self, answer: Any, attribute: ctypes.c_int, pointer: ctypes.c_uint64) -> int:
        assert attribute.value == IS_LEGACY_CUDA_IPC_CAPABLE
        if pointer.value == UNKNOWN:
            return 1
        answer._obj.value = pointer.value == PLAIN
        return 0


@dataclass
class FakeTensor:
    pointer: int
    is_cuda: bool = True

    def data_ptr(self) -> int:
        return self.pointer


def tensors(*of: FakeTensor) -> list[torch.Tensor]:
    return cast("list[torch.Tensor]", list(of))


def test_the_driver_is_asked_of_each_pointer() -> None:
    driver = FakeDriver()
    assert [is_readable(pointer, driver) for pointer in (PLAIN, MAPPED, UNKNOWN)] == [True, False, True]
    assert is_readable(MAPPED, None)


def test_nixl_refuses_a_cache_that_is_mapped() -> None:
    refuse_mapped(tensors(FakeTensor(PLAIN), FakeTensor(MAPPED, is_cuda=False)), FakeDriver())
    with pytest.raises(ConnectorUnavailable, match="expandable_segments"):
        refuse_mapped(tensors(FakeTensor(PLAIN), FakeTensor(MAPPED)), FakeDriver())


@pytest.mark.parametrize(
    ("environ", "during", "after"),
    [
        ({}, "expandable_segments:False", "expandable_segments:True"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
            "max_split_size_mb:64,expandable_segments:False",
            "max_split_size_mb:64,expandable_segments:True",
        ),
        (
            {"PYTORCH_ALLOC_CONF": " expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            "expandable_segments:False",
            " expandable_segments:True",
        ),
    ],
)
def test_the_allocator_is_set_for_the_block_only(environ: dict[str, str], during: str, after: str) -> None:
    settings: list[str] = []
    with contextlib.suppress(ZeroDivisionError), without_segments(settings.append, environ):
        assert settings == [during]
        raise ZeroDivisionError
    assert settings == [during, after]


def test_memory_of_the_host_and_plain_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[str] = []
    monkeypatch.setattr(module, "_set_allocator", settings.append)
    with plain_memory(torch.device("cpu")):
        pass
    monkeypatch.setattr(module, "is_plain", lambda _: True)
    with plain_memory(GPU):
        pass
    assert settings == []
    monkeypatch.setattr(module, "is_plain", lambda _: False)
    with plain_memory(GPU):
        assert len(settings) == 1


@pytest.mark.parametrize(
    ("answers", "verdicts"), [([True], []), ([False, True], [Verdict.OK]), ([False, False], [Verdict.FAIL])]
)
def test_check_says_what_becomes_of_the_cache(answers: list[bool], verdicts: list[Verdict]) -> None:
    @contextmanager
    def apart(_: torch.device) -> Iterator[None]:
        yield

    left = iter(answers)
    found = list(check_memory(GPU, lambda _: next(left), apart))
    assert [finding.verdict for finding in found] == verdicts
    assert all("cuda:0" in finding.what for finding in found)
