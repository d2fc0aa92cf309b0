"""How `benchmarks structured` judges answers."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.structured import judge_text, read_schemas
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "finish_reason", "verdict"),
    [
        ('{"a":"x","b":1}', "stop", "valid"),
        ('{"a":"x"}', "stop", "failed"),
        ('{"a":"x","b":', "stop", "failed"),
        ('{"a":"x', "length", "cut"),
        ('{"a":"é\ufffd', "length", "cut"),
        ("", "length", "cut"),
        ('{"b":1', "length", "failed"),
        ('{"a":"x","b":1}', "tool_calls", "failed"),
    ],
)
def test_an_answer_is_valid_or_a_prefix_or_a_failure(text: str, finish_reason: str, verdict: str) -> None:
    found, why = judge_text(SCHEMA, text, finish_reason)
    assert found == verdict
    assert bool(why) == (verdict == "failed")


def test_schemas_come_in_a_seed_s_order_without_end(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no \*\.json"):
        next(read_schemas(tmp_path, 0))
    for name in "abc":
        (tmp_path / f"{name}.json").write_text(f'{{"schema": {{"const": "{name}"}}}}')
    (tmp_path / "d.json").write_text("{")
    names = [name for name, _ in islice(read_schemas(tmp_path, 1), 6)]
    assert names[:3] == names[3:]
    assert sorted(names[:3]) == ["a", "b", "c"]
    assert names != [name for name, _ in islice(read_schemas(tmp_path, 2), 6)]
