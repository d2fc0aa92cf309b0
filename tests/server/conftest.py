"""Async tests run on asyncio, through anyio's plugin."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest

from pd_cluster.models.token_texts import token_bytes
from pd_cluster.server.grammar import grammar_checks
from pd_cluster.server.routes.openapi import openapi_document
from pd_cluster.server.text import tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def what_all_nodes_share() -> Iterator[None]:
    """Is made once: the OpenAPI document of all apps, and the bytes of each tokenizer's vocabulary.

    Otherwise most of the time of making a node goes into them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pd_cluster.server.routes.meta_routes.openapi_document", cache(openapi_document))
        patch.setattr(tokenizer, "token_bytes", cache(token_bytes))
        yield


@pytest.fixture(autouse=True)
def patient_grammar_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks run at niceness 10 and this half of the suite at 10 too: beside the other half one took 10 s."""
    monkeypatch.setattr(grammar_checks, "REQUEST_DEADLINE_S", 90.0)
    monkeypatch.setattr(grammar_checks, "CHECK_DEADLINE_S", 90.0)
