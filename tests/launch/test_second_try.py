"""The second try of failed tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import second_try

if TYPE_CHECKING:
    from pathlib import Path

FILE = """
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", range({count}))
def test_of_a_busy_machine(number):
    mark = Path(__file__).with_name(f"ran-{{number}}")
    first = not mark.exists()
    mark.touch()
    assert not first or not {is_busy}


def test_that_passes():
    mark = Path(__file__).with_name("ran")
    assert not mark.exists(), "it passed before"
    mark.touch()


def test_that_is_wrong():
    assert not {is_wrong}
"""


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pytest that runs here has no use for those that are installed, and imports them for a second each time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "is_busy", "is_wrong", "status"),
    [(2, False, False, 0), (2, True, False, 0), (2, True, True, 1), (second_try.MOST + 1, True, False, 1)],
    ids=["all pass", "some pass at the second try", "one never passes", "too many failed"],
)
def test_only_tests_that_pass_at_the_second_try_are_forgiven(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], count: int, is_busy: bool, is_wrong: bool, status: int
) -> None:
    path = tmp_path / "test_written.py"
    path.write_text(FILE.format(count=count, is_busy=is_busy, is_wrong=is_wrong))
    assert second_try.main(["-q", "-p", "no:randomly", f"--rootdir={tmp_path}", str(path)]) == status
    said = capfd.readouterr().out
    assert ("SECOND TRY ONLY" in said) == (is_busy and not status)
    if is_busy and not status:
        assert said.rstrip().endswith("test_of_a_busy_machine[1]"), "it is named"


def test_other_ends_of_pytest_are_passed_on(tmp_path: Path) -> None:
    assert second_try.main(["-q", f"--rootdir={tmp_path}", str(tmp_path)]) == 5, "no tests"
