"""The connector of the page works as it is written there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from pd_connectors import base, registry
from pd_connectors.base import CachedBlock
from pd_connectors.head_parts import head_parts
from pd_connectors.protocol.errors import ConnectorUnavailable
from pd_connectors.protocol.hashing import extend_hashes, root_hash
from pd_connectors.registry import create_connector
from tests.conformance.harness import Reader
from tests.connectors.remote_node import LAYOUT, Node, context, is_stamped, stamp
from tests.deadlines import HANG_S
from tests.docs.pages import ROOT, blocks
from tests.integration.system import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_LINES = 60
NAME = "directory_pool:DirectoryConnector"
HASHES = extend_hashes(root_hash(""), list(range(3 * LAYOUT.block_size)), LAYOUT.block_size)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's code, importable."""
    page = (ROOT / "docs" / "connector.md").read_text()
    (code,) = [block for language, block in blocks(page) if language == "python"]
    assert len(code.splitlines()) <= MAX_LINES
    (tmp_path / "directory_pool.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("directory_pool", None)


def start(name: str, folder: Path) -> Node:
    options = (("pool_url", str(folder)), ("handoff", "none"), ("pool_deadline_s", HANG_S))
    return Node.start(NAME, context(name, options=options), 8)


def loaded(node: Node, load_id: str) -> int:
    """Tokens of the prompt that the pool brought, into blocks 5, 6 and 7."""
    assert node.connector.pool is not None
    reader = Reader(node)
    node.connector.pool.find(load_id, HASHES, (0,) * len(LAYOUT.groups))
    if reader.wait_found(load_id):
        reader.read(load_id, (5, 6, 7))
    return reader.wait_end(load_id).num_tokens


def test_what_one_node_stores_another_reads(module: None, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    source, reader = start("P", folder), start("D", folder)
    try:
        for block_id in range(3):
            stamp(source.cache, block_id, 1)
        assert source.connector.pool is not None
        groups = range(len(LAYOUT.groups))
        blocks = [CachedBlock(HASHES[block], block, group) for block in range(3) for group in groups]
        source.connector.pool.store(blocks)
        num_files = 3 * sum(map(len, head_parts(LAYOUT, 0)))
        wait_until(lambda: len(list(folder.glob("pd-*"))) == num_files, lambda: f"{list(folder.iterdir())}")
        assert loaded(reader, "whole") == 3 * LAYOUT.block_size
        assert all(is_stamped(reader.cache, 5 + block, block, 1) for block in range(3))
        for path in folder.glob(f"*{HASHES[1].hex()}"):
            path.write_bytes(b"x" + path.read_bytes()[1:])
        assert loaded(reader, "damaged") == LAYOUT.block_size, "a damaged block only makes the prefix shorter"
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        assert loaded(reader, "gone") == 0
    finally:
        source.connector.close()
        reader.connector.close()


def test_a_wrong_address_is_refused(module: None) -> None:
    with pytest.raises(ConnectorUnavailable, match="absolute directory"):
        create_connector(NAME, context("P", options=(("pool_url", "lm://x"), ("handoff", "none"))))


def test_a_later_node_refuses_what_the_page_teaches(module: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that imports the version would claim the later one."""
    later = base.API_VERSION + 1
    for place in (base, registry):
        monkeypatch.setattr(place, "API_VERSION", later)
    with pytest.raises(ConnectorUnavailable, match="api_version"):
        create_connector(NAME, context("P"))
