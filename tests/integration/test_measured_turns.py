"""`bench serve --turns` on a real cluster: what later turns find of the turns before them."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import pytest

from pd_cluster.launch.cli import main
from tests.integration.system import BLOCK_SIZE, System

if TYPE_CHECKING:
    import pathlib

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
LOAD = "--turns 3 --num-requests 3 --at-once 2 --history 90:400 --head-len 64 --input-len 20:40 --output-len 17:24"


@pytest.mark.parametrize("kind", ["ids", "text"])
def test_later_turns_find_the_turns_before(kind: str, shared_system: System, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out.json"
    more = ["--text"] if kind == "text" else []
    arguments = f"bench serve --url {shared_system.router_url} {LOAD} --tool-s 0.01 --seed 40 --warmup 1 --json {out}"
    assert main([*arguments.split(), *more]) == 0
    found = json.loads(out.read_text())
    requests, summary = found["requests"], found["summary"]
    assert (len(requests), summary["num_unasked"], summary["errors"]) == (9, 0, {})
    assert all(17 <= one["num_output"] <= 24 and one["route"] for one in requests)
    later = [(before, one) for before, one in itertools.pairwise(requests) if one["turn"]]
    for before, one in later:
        assert before["num_input"] < one["num_input"]
        assert one["num_cached"] > before["num_input"] - 2 * BLOCK_SIZE, "whole blocks of the prompt before"
    assert summary["found_history"] > 0.8
    shared_system.settle()
