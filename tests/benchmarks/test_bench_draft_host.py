"""Recorded texts in place of a model: what drafts take of the step loop is measured where there are drafts."""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING

from benchmarks import draft_host
from benchmarks.draft_host import RecordedNode, main, texts_of

if TYPE_CHECKING:
    import pytest


STEPS = 25


def test_edits_are_drafted_and_what_matches_nothing_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_host, "STEPS", STEPS)
    monkeypatch.setattr(draft_host, "WARM_STEPS", 10)
    # Beside all tests each round but the first searched a million objects that it had not made: 6 s of CPU
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    texts = texts_of("edits", 2)
    none, lookup = (RecordedNode(texts, drafts=drafts).run() for drafts in (False, True))
    assert none.num_drafts == 0
    assert none.num_tokens == 2 * STEPS < lookup.num_tokens <= 2 * STEPS + lookup.num_drafts
    assert main(["--cases", "unmatched", "--sequences", "2", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"unmatched .* 2 +│ +0 +│", shown), "tokens and drafts of a step"
