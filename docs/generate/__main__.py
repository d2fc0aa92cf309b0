"""`python -m docs.generate [NAME ...]`: writes the generated parts of the documents. Without names: all of them."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING

from docs.generate.document import ROOT, filled

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGES = {
    "models": "the architectures in docs/models.md, from the registry",
    "configuration": "the flags in docs/configuration.md, from the command line's parsers",
    "api": "endpoints, fields and errors in docs/api.md, from the routes and the request bodies",
    "metrics": "metrics and alerts in docs/operations.md, from the registries and the chart",
    "kv_memory": "the figures in docs/kv_memory.md, from the arithmetic of `python -m benchmarks memory`",
    "dashboard": "the Grafana dashboard of the chart, helm/pd-cluster/files/dashboard.json, all of it",
    "clients": "the tables of docs/clients.md, from the bodies of clients in tests/world/clients",
    "matrix": "the support matrix in README.md, from the registries and the request bodies",
    "suite": "the table of the tests in CONTRIBUTING.md, from their recorded runs",
}
"""Modules of this package, and what each one writes."""


def written(name: str) -> tuple[str, str]:
    """The document of a page, and its text with every generated part (or all of it) written again.

    Raises ValueError if the document's parts are not those of the module, and OSError.
    """
    module = import_module(f"docs.generate.{name}")
    document: str = module.DOCUMENT
    if hasattr(module, "text"):
        return document, module.text()
    return document, filled((ROOT / document).read_text(encoding="utf-8"), module.PARTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0. Raises ValueError and OSError as `written` does."""
    width = max(map(len, PAGES))
    parser = argparse.ArgumentParser(
        prog="python -m docs.generate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="names:\n" + "".join(f"  {name:{width}}  {text}\n" for name, text in PAGES.items()),
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="See below. Default: all.")
    names = parser.parse_args(arguments).names or list(PAGES)
    if unknown := [name for name in names if name not in PAGES]:
        parser.error(f"unknown name {unknown[0]}; known are {', '.join(PAGES)}")
    for name in names:
        document, text = written(name)
        (ROOT / document).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
