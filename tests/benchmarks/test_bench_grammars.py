"""The vocabulary and the loads of the measurement of grammars."""

from __future__ import annotations

import base64
import json
import random
from typing import TYPE_CHECKING, Any, cast

import pytest

from benchmarks import gpu_grammars
from benchmarks.gpu_grammars import HOSTILE, GrammarBench, GrammarLoad
from benchmarks.offline import Generated
from benchmarks.vocabulary import write_vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.offline import OfflineEngine


def test_a_vocabulary_has_the_bytes_of_its_tokens(tmp_path: Path) -> None:
    llguidance = pytest.importorskip("llguidance")
    pieces = [bytes([byte]) for byte in range(255)] + [b'{"a', " ü".encode()]
    told = {
        "config": {"default_num_special_tokens": 4},
        "vocab": [{"rank": at, "token_bytes": base64.b64encode(piece).decode()} for at, piece in enumerate(pieces)],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(told))
    end = write_vocabulary(tmp_path / "tekken.json", 4 + len(pieces), tmp_path / "tokenizer.json")
    assert end == 2
    vocabulary = llguidance.LLTokenizer((tmp_path / "tokenizer.json").read_text(), eos_token=[end])
    assert [vocabulary.decode_bytes([4 + at]) for at in range(len(pieces))] == pieces


class FakeEngine:
    """Says what an engine would: the i-th prompt takes 1 + i ms a token."""

    def __init__(self) -> None:
        self.executor = self.core = self._scheduler = self.model = self._runner = self
        self.vocab_size = 100
        self.counters = {"draws_sat_out_total": 0.0}
        self._deferred = True

    def draw_late(self) -> float:
        return 0.002

    def generate(self, prompts: list[list[int]], samplings: list[Any]) -> Generated:
        num_tokens = samplings[0].max_tokens
        for _ in range(num_tokens):
            self.draw_late()
        self.counters["draws_sat_out_total"] += num_tokens - 3
        lasts = tuple(1.0 + (num_tokens - 1) * (1 + at) / 1e3 for at in range(len(prompts)))
        return Generated(9.0, (1.0,) * len(prompts), lasts, [[2] + [7] * (num_tokens - 1)] * len(prompts))


def test_loads_are_told_by_kind_of_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_grammars, "NUM_TOKENS", 13)
    engine = FakeEngine()
    bench = GrammarBench(cast("OfflineEngine", engine), [f"g{at}" for at in range(64)], random.Random(0))
    half = bench.measure("half")
    assert half.constrained_ms == pytest.approx(16.5)
    assert half.free_ms == pytest.approx(48.5)
    assert half.sat_out == pytest.approx(10 / (10 + 32 * 13))
    assert half.ended == pytest.approx(1 / 13)
    assert half.waits_ms == [2.0] * 13
    assert bench.measure("free").constrained_ms is None
    hostile = bench.measure("hostile")
    assert hostile.constrained_ms == pytest.approx(34.5), "without the four"
    assert bench._of("hostile")[:5] == [HOSTILE] * 4 + ["g4"]


def test_waits_have_quantiles() -> None:
    load = GrammarLoad("all", None, 1.0, 0.0, 0.0, [float(at) for at in range(1000)])
    assert (load.wait_ms(0.5), load.wait_ms(0.999)) == (500.0, 999.0)
    assert GrammarLoad("free", 1.0, None, 0.0, 0.0, []).wait_ms(0.5) == 0
