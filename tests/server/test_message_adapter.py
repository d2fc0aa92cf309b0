"""No chat template drops a message: small templates of each kind that models are published with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from pd_cluster.server.chat_template import ChatTemplate
from pd_cluster.server.message_adapter import adapt
from pd_cluster.server.normal_messages import normal_messages
from pd_cluster.server.template_traits import START, Joint, NoContent, ResultForm, TemplateTraits
from tests.server.live_server import MODEL_DIR
from tests.server.lost_marks import OPTIONS, TOOL, lost_marks
from tests.server.small_templates import TEMPLATES

if TYPE_CHECKING:
    from collections.abc import Callable

@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(MODEL_DIR))


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> Callable[[str], ChatTemplate]:
    def made(name: str) -> ChatTemplate:
        tokenizer.chat_template = TEMPLATES.get(name, name)
        return ChatTemplate(tokenizer)

    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_lost(name: str, tokenizer: Any) -> None:
    assert lost_marks(tokenizer, TEMPLATES[name]) == []


def test_a_template_that_drops_a_turn_refuses_it(chat: Callable[[str], ChatTemplate]) -> None:
    """In no form that was tried is the message in the prompt."""
    last_only = chat("{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}")
    user, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}
    assert last_only.render([user], None, OPTIONS) == "Hello"
    with pytest.raises(Exception, match="drops a message of kind assistant"):
        last_only.render([user, answer, user], None, OPTIONS)
