"""Recorded texts in place of a model: what drafts take of the step loop is measured where there are drafts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchmarks.draft_host import STEPS, RecordedNode, main, texts_of

if TYPE_CHECKING:
    import pytest


def test_edits_are_drafted_and_what_matches_nothing_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    texts = texts_of("edits", 2)
    none, lookup = (RecordedNode(texts, drafts=drafts).run() for drafts in (False, True))
    assert none.num_drafts == 0
    assert none.num_tokens == 2 * STEPS < lookup.num_tokens <= 2 * STEPS + lookup.num_drafts
    assert main(["--cases", "unmatched", "--sequences", "2", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"unmatched .* 2 +│ +0 +│", shown), "tokens and drafts of a step"
