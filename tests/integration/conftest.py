"""What the integration tests compare with. Computed once, and only when a test asks for it."""

from __future__ import annotations

import logging

import pytest

from tests.integration.reference import DemoModel, Reference, make_prompts

SEED = 20


@pytest.fixture(scope="session", autouse=True)
def _quiet_clients() -> None:
    """Each request of ours is no news."""
    logging.getLogger("httpx").setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def demo_model() -> DemoModel:
    """The demo model under transformers."""
    return DemoModel()


@pytest.fixture(scope="session")
def references(demo_model: DemoModel) -> list[Reference]:
    """200 prompts and what transformers makes of them."""
    return demo_model.generate(make_prompts(demo_model, SEED))
