"""Where the cluster's key comes from, and that no key at all is never taken for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_connectors.protocol.keys import KEY_ENV, load_cluster_key

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this user's own key; nothing in the environment."""
    monkeypatch.delenv(KEY_ENV, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "pd-cluster"


def test_the_user_key_is_made_once_and_for_this_user_only(home: Path) -> None:
    key = load_cluster_key()
    assert load_cluster_key() == key
    assert [path.name for path in home.iterdir()] == ["key"]
    assert (home / "key").stat().st_mode & 0o777 == 0o600


def test_file_before_environment_before_user(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_user = load_cluster_key()
    monkeypatch.setenv(KEY_ENV, "from the environment")
    of_environment = load_cluster_key()
    (tmp_path / "file").write_text("from a file\n")
    assert len({of_user, of_environment, load_cluster_key(str(tmp_path / "file"))}) == 3


@pytest.mark.parametrize("content", ["", "\n", "  \t\n"])
def test_an_empty_key_file_is_refused_by_name(home: Path, tmp_path: Path, content: str) -> None:
    given = tmp_path / "given"
    given.write_text(content)
    with pytest.raises(ValueError, match=f"the cluster key file {given} is empty"):
        load_cluster_key(str(given))
    home.mkdir()
    (home / "key").write_text(content)
    with pytest.raises(ValueError, match=f"the cluster key file {home / 'key'} is empty"):
        load_cluster_key()
