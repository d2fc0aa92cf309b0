"""The documentation's pages as text, and the commands in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ELLIPSIS = {"...", "\\"}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of each code block."""
    return [(match[1], match[2]) for match in _FENCE.finditer(text)]


def prose(text: str) -> str:
    """The text without code blocks."""
    return _FENCE.sub("", text)


def commands(text: str, program: str) -> list[list[str]]:
    """The arguments of each call of `program` in a code block. Comments and `...` are left out."""
    found = []
    for _, block in blocks(text):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            words = shlex.split(line, comments=True) if program in line else []
            starts = [i for i, word in enumerate(words) if word == program or word.endswith(f"/bin/{program}")]
            found += [[word for word in words[start + 1 :] if word not in _ELLIPSIS] for start in starts]
    return found
