"""The tables of `docs/clients.md`, from the heads and the requests of the bodies in `tests/world/clients`."""

from __future__ import annotations

import json
from typing import Any

from docs.generate.document import ROOT, code, table

DOCUMENT = "docs/clients.md"
SPECS = ROOT / "tests/world/clients"
TRIED = {
    "ran": "ran itself",
    "recorded": "body only, recorded",
    "source": "body only, from its source",
}


def specs() -> list[dict[str, Any]]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in SPECS.glob("*.json")]
    return sorted(found, key=lambda spec: (spec["head"]["client"].lower(), spec["path"]))


def _settings() -> str:
    rows = []
    for spec in specs():
        head = spec["head"]
        rows.append([head["client"], code(spec["path"]), f"{head['package']} {head['version']}", head["settings"]])
    return table(["client", "API", "package and version", "settings"], rows)


def _tried() -> str:
    rows = []
    for spec in specs():
        head = spec["head"]
        rows.append(
            [
                head["client"],
                code(spec["path"]),
                TRIED[head["tried"]] + f": {head['command']}",
                str(_num_tools(spec)),
                ", ".join(name.replace("_", " ") for name in spec["requests"]),
                ", ".join(map(code, head["left_out"])) or "nothing",
            ]
        )
    return table(["client", "API", "tried", "tools", "requests", "left out"], rows)


def _num_tools(spec: dict[str, Any]) -> int:
    """Of the first turn, those of groups counted one by one."""
    return _count({**spec["shared"], **spec["requests"]["first"]}.get("tools", []))


def _count(tools: list[dict[str, Any]]) -> int:
    return sum(one["$repeat"] if "$repeat" in one else _count(one["tools"]) if "tools" in one else 1 for one in tools)


PARTS = {"settings": _settings, "tried": _tried}
