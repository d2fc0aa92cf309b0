"""A profiler that fails must not end the engine."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest
import torch

from pd_cluster.worker import profiler as module
from pd_cluster.worker.profiler import Profiler

if TYPE_CHECKING:
    from pathlib import Path


class Broken:
    """A record of torch that fails at `at`. Its methods have torch's names."""

    def __init__(self, at: str) -> None:
        self._at = at

    def _fail(self, name: str) -> None:
        assert name != self._at, "torch asserts in several of these"

    def start(self) -> None:
        self._fail("start")

    def stop(self) -> None:
        self._fail("stop")

    def export_chrome_trace(self, path: str) -> None:
        self._fail("export")


@pytest.mark.parametrize("at", ["start", "stop", "export"])
def test_an_assertion_of_torch_is_logged(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "profile", lambda **_: Broken(at))
    profiler = Profiler(torch.device("cpu"))
    profiler.start()
    profiler.stop(str(tmp_path))
    assert "profile" in caplog.text
    profiler.stop(str(tmp_path))  # nothing records any more


def test_starts_and_stops_in_any_order_and_a_directory_that_is_a_file(tmp_path: Path) -> None:
    profiler = Profiler(torch.device("cpu"))
    profiler.stop(str(tmp_path))
    profiler.start()
    profiler.start()
    torch.ones(4).sum()
    profiler.stop(str(tmp_path / "new"))
    (file,) = (tmp_path / "new").iterdir()
    assert json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    profiler.start()
    profiler.stop(str(file / "below"))
    profiler.start()
    profiler.stop()
    assert list((tmp_path / "new").iterdir()) == [file]
