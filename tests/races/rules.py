"""The six rules over a file."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from tests.races.code import Code, Finding, Rule
from tests.races.deadlines import short_deadlines
from tests.races.elapsed import elapsed
from tests.races.lent_ports import lent_ports
from tests.races.shared import shared
from tests.races.sleeps import sleeps
from tests.races.times import Spans
from tests.races.unsettled import unsettled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.races.sources import Source, Sources

RULES = {
    Rule.ELAPSED: elapsed,
    Rule.DEADLINE: short_deadlines,
    Rule.SLEEP: sleeps,
    Rule.UNSETTLED: unsettled,
    Rule.SHARED: shared,
    Rule.PORT: lent_ports,
}


def findings(spans: Spans, source: Source) -> Iterator[Finding]:
    """All of one file."""
    for name, owner, unit in source.units:
        code = Code(spans, source, owner, unit)
        for rule, look in RULES.items():
            for node, text in dict.fromkeys(look(code)):
                yield Finding(source.path, getattr(node, "lineno", 0), name, rule, text)


def search(sources: Sources) -> list[Finding]:
    """All of a tree. Syntax trees are many objects and no garbage: each look for it would take a second."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        spans = Spans(sources)
        return [one for source in sources.live.values() for one in findings(spans, source)]
    finally:
        if is_on:
            gc.enable()
