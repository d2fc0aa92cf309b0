"""A hook of MkDocs for links from a page to a file of the repository outside `docs/`.

On GitHub such a link works as it is written. MkDocs knows only files under `docs/`, so it would call the link broken.
Here the link is checked against the working tree. It becomes a link into the repository where `repo_url` is set in
`mkdocs.yml`, else its text and the file's path.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
logger = logging.getLogger("mkdocs.hooks.repository_links")  # a warning of it fails a strict build
_LINK = re.compile(r"\[(?P<text>[^\]\n]+)\]\((?P<target>\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page's Markdown with its links out of `docs/` replaced."""
    uri: str = page.file.src_uri
    found, missing = replaced(markdown, uri, config.get("repo_url") or "")
    for target in missing:
        logger.warning("%s: the link target %s is not in the repository", uri, target)
    return found


def replaced(markdown: str, uri: str, repo_url: str) -> tuple[str, list[str]]:
    """The Markdown of the page at `uri` (below `docs/`), and its link targets that do not exist."""
    missing: list[str] = []

    def replace(match: re.Match[str]) -> str:
        path, _, anchor = match["target"].partition("#")
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), path))
        if path.startswith("docs/"):
            return match[0]
        if path.startswith("..") or not (ROOT / path).exists():
            missing.append(match["target"])
            return match["text"]
        text = match["text"].strip("`")
        if not repo_url:
            return f"`{path}`" if path.endswith(text) else f"{match['text']}, `{path}`"
        return f"[{match['text']}]({repo_url}/blob/main/{path}{'#' * bool(anchor)}{anchor})"

    return _LINK.sub(replace, markdown), missing
