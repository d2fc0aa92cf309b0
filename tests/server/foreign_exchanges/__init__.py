"""Requests of foreign routers to a prefill and a decode node, with the nodes' answers, as JSON: one file a router.

A file is a list of exchanges `{"asked": {...}, "legs": [P's, D's]}`, a leg
`{"node", "path", "headers", "body", "status", "type", "answer"}`; the answer of a stream is the list of its events. In
D's body OF_PREFILL stands for what P has answered in the same place, and TICKET for any ticket: what a router sets
itself is there as it was. The slow test `tests/integration/test_foreign_routers.py` compares the files with the
routers, and writes them with PD_RECORD=1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OF_PREFILL, TICKET = "<of prefill>", "<ticket>"
PARAMS = "kv_transfer_params"
ROUTERS = ("vllm-router-0.1.17", "production-stack-a6c01db")
Exchange = dict[str, Any]
_FOLDER = Path(__file__).parent


def path_of(router: str) -> Path:
    return _FOLDER / f"{router}.json"


def load(router: str) -> list[Exchange]:
    exchanges: list[Exchange] = json.loads(path_of(router).read_text())
    return exchanges


def save(router: str, exchanges: list[Exchange]) -> None:
    path_of(router).write_text(json.dumps(exchanges, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def shape(value: Any) -> Any:
    """Names and types without values. Of a list, the shapes that occur in it. Names of tokens are values."""
    if isinstance(value, dict):
        return {name: name if name == "top_logprobs" else shape(one) for name, one in value.items()}
    if isinstance(value, list):
        shapes = {json.dumps(shape(one), sort_keys=True) for one in value}
        return sorted(shapes)
    if isinstance(value, bool) or value is None:
        return str(value)
    return "number" if isinstance(value, int | float) else "text"
