"""A model's chat template: conversations as the text of a prompt."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError
from pd_cluster.server.template_stability import TemplateStability

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pd_cluster.server.template_stability import Decider

_QUERY, _DOCUMENT = (re.compile(f"""['"]{role}['"]""") for role in ("query", "document"))
_NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer. It is a program. Use it from one thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stability = TemplateStability(str(tokenizer.chat_template or ""), self.render)

    @property
    def exists(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def text(self) -> str:
        """The default one; "" for none."""
        template = self._tokenizer.chat_template or ""
        return template if isinstance(template, str) else str(template.get("default", ""))

    @property
    def asks_about_documents(self) -> bool:
        """Whether the chat template renders a query and a document, which are messages with these roles."""
        return bool(_QUERY.search(self.text) and _DOCUMENT.search(self.text))

    @property
    def writes_date(self) -> bool:
        """Whether the chat template may write the day's date, so that a prompt has other tokens on another day."""
        return "strftime_now" in str(self._tokenizer.chat_template or "")

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        at_s: float | None = None,
    ) -> str:
        """The prompt's text. `at_s`: Unix seconds for a template that writes the date; None: now. May raise."""
        if at_s is not None and self.writes_date and isinstance(self._tokenizer.chat_template, str):
            options = options | {"chat_template": _template_at(self.text, at_s)}
        return str(self._tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, **options))

    def deciders(
        self, messages: Sequence[dict[str, Any]], *, has_tools: bool, options: dict[str, Any]
    ) -> list[Decider]:
        """See `TemplateStability.deciders`."""
        return self._stability.deciders(messages, has_tools=has_tools, options=options)

    def generation_prompt(self, options: dict[str, Any]) -> str:
        """What the template writes behind the last message for these options; "" when it cannot tell."""
        messages = [{"role": "user", "content": "a"}]
        plain = options | {"add_generation_prompt": False, "continue_final_message": False}
        try:
            before = self._tokenizer.apply_chat_template(messages, tokenize=False, **plain)
            whole = self._tokenizer.apply_chat_template(
                messages, tokenize=False, **plain | {"add_generation_prompt": True}
            )
        except Exception:  # templates are programs, which may raise anything
            return ""
        return str(whole).removeprefix(str(before))


def _template_at(template: str, at_s: float) -> str:
    """The template with the dates of another time as literals: transformers lets it ask for the present only."""
    at = datetime.fromtimestamp(at_s)
    return _NOW.sub(lambda call: json.dumps(at.strftime(call[2])), template)


def template_in(path: Path, tokenizer: Any) -> str:
    """The chat template in this file. Raises StartupError for one that cannot be read or is not Jinja."""
    from jinja2 import TemplateSyntaxError  # a requirement of transformers' chat templates

    try:
        template = path.expanduser().read_text(encoding="utf-8")
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
    except (OSError, RuntimeError, UnicodeDecodeError, TemplateSyntaxError) as error:  # RuntimeError: ~ without a home
        raise StartupError(f"--chat-template {path}: {error}") from error
    except Exception:  # templates are programs: this conversation may be one that it refuses
        return template
    return template
