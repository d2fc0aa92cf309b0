"""Documents with generated parts: the text between `<!-- generated: NAME -->` and `<!-- end -->` is written by code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

ROOT = Path(__file__).parents[2]
_PLACE = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """`text` with every generated part written again. Raises ValueError unless its parts are exactly `parts`."""
    named = [match["name"] for match in _PLACE.finditer(text)]
    if sorted(named) != sorted(parts):
        raise ValueError(f"the document has the parts {sorted(named)}, the generator {sorted(parts)}")
    return _PLACE.sub(lambda match: f"{match[1]}\n{parts[match['name']]().strip()}\n\n{match[3]}", text)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. Bars in cells are escaped."""
    lines = [headers, ["---"] * len(headers), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines)


def code(text: str) -> str:
    """`text` in Markdown's code style; "" stays empty."""
    return f"`{text}`" if text else ""
