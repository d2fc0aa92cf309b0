"""No test leaves a variable to the next one."""

from __future__ import annotations

import os

import pytest

from tests.kept_environment import kept_environment


def test_the_environment_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_CHANGED", "before")
    monkeypatch.setenv("PD_REMOVED", "before")
    before = dict(os.environ)
    with kept_environment():
        os.environ.update({"PD_ADDED": "1", "PD_CHANGED": "after"})
        del os.environ["PD_REMOVED"]
    assert dict(os.environ) == before


@pytest.mark.parametrize("time", ["first", "second"])
def test_no_test_finds_what_another_one_set(time: str) -> None:
    assert "PD_SET_BY_A_TEST" not in os.environ
    os.environ["PD_SET_BY_A_TEST"] = time
