"""The page of limits: its flags have the defaults that it names, its constants the values, its fields their places."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module

import pytest

from pd_cluster.config import NodeConfig
from pd_cluster.protocol.sampling_params import _RANGES
from pd_cluster.server.bodies.fields import HARMLESS, REFUSED
from pd_cluster.server.bodies.schema import ChatBody, CompletionBody
from pd_cluster.server.requests.prompt_bodies import EmbeddingBody, RerankBody
from pd_http.settings import flag_of
from pd_router.config import RouterConfig
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
CODE = re.compile(r"`([^`]+)`")
BODIES = (ChatBody, CompletionBody, EmbeddingBody, RerankBody)


def defaults() -> dict[str, set[str]]:
    """What each setting of nodes and routers is by default, by its flag. A node's may differ from a router's."""
    found: dict[str, set[str]] = {}
    for kind in (*NodeConfig.sections().values(), RouterConfig):
        for item in fields(kind):
            found.setdefault(f"--{flag_of(item)}", set()).add(as_text(item.default))
    return found


def as_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_flags_have_the_defaults_that_are_named() -> None:
    named = re.findall(r"`(--[a-z0-9-]+)`: ([\w.-]+)", PAGE)
    assert len(named) > 25
    known = defaults()
    assert [(flag, value, known.get(flag)) for flag, value in named if value not in known.get(flag, ())] == []


def test_constants_have_the_values_that_are_named() -> None:
    named = re.findall(r"`([\w/]+\.py)`: `(\w+)` = ([\d.]+)", PAGE)
    assert len(named) > 20
    for file, name, value in named:
        module = file.removeprefix("router/").removeprefix("connectors/").removesuffix(".py").replace("/", ".")
        assert float(getattr(import_module(module), name)) == float(value), (file, name)


def test_constants_are_told_in_words_too() -> None:
    """The number in a row's text is that of its constant."""
    for row in ROWS:
        for value in re.findall(r"`\w+` = ([\d.]+)", row[-1]):
            number = float(value)
            forms = {f"{number:,g}", f"{number:,.0f}", f"{number / 2**10:g} KiB", f"{number / 2**20:g} MiB"}
            assert any(re.search(rf"(?<![\d.,]){re.escape(form)}(?!,?\d)", " ".join(row[:-1])) for form in forms), row


@pytest.mark.parametrize(("word", "places"), [("refused", REFUSED), ("ignored", HARMLESS)])
def test_fields_are_refused_or_ignored(word: str, places: dict[str, object]) -> None:
    rows = [row[0] for row in ROWS if row[0].startswith(f"{word}: ")]
    names = [name for row in rows for name in CODE.findall(row)]
    assert len(names) > 5
    assert [name for name in names if name not in places] == []


def test_fields_with_a_bound_are_read() -> None:
    part = PAGE.split("| served within a bound |")[1].split("\n## ")[0]
    first_cells = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| ")]
    names = {name for cell in first_cells for name in CODE.findall(cell)} - {"uniqueItems", "not"}
    known = {name for body in BODIES for name in body.__struct_fields__}
    assert {"n", "stop", "logit_bias"} <= names <= known


def test_most_answers_of_a_request() -> None:
    [most] = [most for name, _, most in _RANGES if name == "n"]
    assert f"| `n` | {most} |" in PAGE


def test_files_of_its_rows_exist() -> None:
    named = [name for row in ROWS for name in CODE.findall(row[-1]) if name.endswith(".py")]
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).is_file()] == []
