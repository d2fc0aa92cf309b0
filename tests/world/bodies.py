"""Request bodies of real clients: the specs of `clients/` with texts of our own. Marks in these can be looked for.

A spec has the structure that a client of a named version sends, as `recorder.py` saw it or as its source says:

    path       of the request
    shared     members that most of its requests have
    requests   name -> members; "$absent" takes one of `shared` away

A string may hold `{{N}}` (N characters of prose, which begin and end with a mark of their own), `{{#N KEY}}` (an
identifier), `{{label N}}` (changes with each request), `{{tool}}` and `{{tool K}}` (the name of that tool) and
`{{model}}`. `{"$json": ...}` is JSON as text; `{"$repeat": N, "of": [...]}` in a list stands for N entries.
The same place has the same text in each request of a client, so that a later turn begins as the first one does.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "clients"
ABSENT = "$absent"
MARK = re.compile(r"q[0-9a-f]{10}[yz]")
MIN_PROSE = 12  # characters of a mark
_HOLE = re.compile(r"\{\{(#?)(\w*) ?(\S*?)\}\}")
_VERBS = ("list", "read", "create", "update", "delete", "search", "move", "count", "merge", "close")
_NOUNS = (
    "issue",
    "branch",
    "page",
    "order",
    "ticket",
    "sheet",
    "route",
    "shelf",
    "parcel",
    "invoice",
    "river",
    "meadow",
)
_LINES = (
    "a an the it that this each one two some when then after before with without into over under from to and or not is",
    "are has gives takes keeps reads writes opens closes finds shows begins ends stays file folder line word page row",
    "table list value number name text place answer question task step result tool call user branch change test error",
    "short long plain first last next same other empty whole small large quick careful always never only often",
)
_WORDS = [word for line in _LINES for word in line.split()]


class ClientSpec(NamedTuple):
    """One file of `clients/`. `head`: what the documentation says of the client."""

    name: str
    head: dict[str, Any]
    path: str
    shared: dict[str, Any]
    requests: dict[str, dict[str, Any]]

    def body(
        self, request: str, model: str, *, label: int = 0, stream: bool | None = None, texts: str = ""
    ) -> dict[str, Any]:
        """The body of one request.

        `label`: its number, for labels that change. `stream`: None: as the client does. `texts`: others for each word.
        """
        members = {**self.shared, **self.requests[request]}
        given = {key: value for key, value in members.items() if value != ABSENT}
        built: dict[str, Any] = _Builder(f"{self.name}{texts}", model, label).built(given, "")
        if stream is not None:
            built["stream"] = stream
        if stream is False:
            built.pop("stream_options", None)  # those of a stream alone
        return built


def client_specs() -> dict[str, ClientSpec]:
    """All, by name."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.json"))}


def _read(path: Path) -> ClientSpec:
    spec = json.loads(path.read_text(encoding="utf-8"))
    return ClientSpec(path.stem, spec["head"], spec["path"], spec["shared"], spec["requests"])


class Marked(NamedTuple):
    """A text of a body that the model must see. `path`: as `tools[3].function.description`."""

    path: str
    text: str


def marks(body: dict[str, Any]) -> list[Marked]:
    """Every mark in a body, and the name of each of its tools."""
    found: list[Marked] = []
    _collect(body, "", found)
    return found


def _collect(value: Any, path: str, found: list[Marked]) -> None:
    if isinstance(value, dict):
        if "name" in value and ("parameters" in value or "input_schema" in value or "format" in value):
            found.append(Marked(f"{path}.name", value["name"]))
        for key, one in value.items():
            _collect(one, f"{path}.{key}" if path else key, found)
    elif isinstance(value, list):
        for at, one in enumerate(value):
            _collect(one, f"{path}[{at}]", found)
    elif isinstance(value, str):
        found.extend(Marked(path, mark) for mark in MARK.findall(value))


def tool_name(number: int) -> str:
    """Of a tool of an MCP server."""
    return f"{_VERBS[number % len(_VERBS)]}_{_NOUNS[number // len(_VERBS) % len(_NOUNS)]}"


def prose(num_chars: int, seed: str) -> str:
    """`num_chars` characters (MIN_PROSE at least) that begin with the mark of `seed`, and end with it if it fits."""
    digest = hashlib.sha256(seed.encode()).hexdigest()
    begin, end = f"q{digest[:10]}y", f"q{digest[:10]}z"
    if num_chars < 2 * MIN_PROSE + 2:
        return begin.ljust(num_chars, ".")
    chosen = random.Random(seed)
    rest = num_chars - 2 * MIN_PROSE
    text = ""
    while len(text) < rest:
        text += f" {chosen.choice(_WORDS)}" if chosen.random() > 0.1 else f" {chosen.choice(_WORDS)}.\n"
    return f"{begin}{text[: rest - 1]} {end}"


class _Builder:
    def __init__(self, texts: str, model: str, label: int) -> None:
        self._texts = texts
        self._model = model
        self._label = label

    def built(self, value: Any, path: str, number: int = 0) -> Any:
        """`value` with all of its holes filled. `number`: of the entry of a `$repeat` in which it is."""
        if isinstance(value, str):
            holes = iter(range(1 << 10))
            return _HOLE.sub(lambda hole: self._filled(hole, f"{path}#{next(holes)}", number), value)
        if isinstance(value, dict):
            if "$json" in value:
                return json.dumps(self.built(value["$json"], path, number), separators=(",", ":"))
            return {key: self.built(one, f"{path}.{key}" if path else key, number) for key, one in value.items()}
        if isinstance(value, list):
            return [self.built(one, f"{path}[{at}]", count) for at, (one, count) in enumerate(_entries(value, number))]
        return value

    def _filled(self, hole: re.Match[str], place: str, number: int) -> str:
        is_identifier, word, key = hole.groups()
        if is_identifier:
            return hashlib.sha256(f"{self._texts} {key}".encode()).hexdigest()[: int(word)].ljust(int(word), "0")
        if word == "model":
            return self._model
        if word == "tool":
            return tool_name(int(key) if key else number)
        if word == "label":
            return hashlib.sha256(str(self._label).encode()).hexdigest()[: int(key)]
        return prose(int(word), f"{self._texts} {place}")


def _entries(values: list[Any], number: int) -> list[tuple[Any, int]]:
    entries: list[tuple[Any, int]] = []
    for value in values:
        if isinstance(value, dict) and "$repeat" in value:
            entries += [(value["of"][at % len(value["of"])], at) for at in range(value["$repeat"])]
        else:
            entries.append((value, number))
    return entries
