"""Marks and names of blocks under the chat templates of published models, which a package on the index carries.

Theirs are the shapes that `test_prompt_steps.py` imitates. Where the package cannot be had, the test is skipped.
"""

from __future__ import annotations

import random
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.server.lost_marks import lost_marks
from tests.server.test_prompt_steps import Node, check_names, short_steps  # noqa: F401 (a fixture)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PACKAGE = "trl==1.16.0"
INSTALL_DEADLINE_S = 300.0
TEMPLATES = ("qwen2_5", "qwen3", "qwen3_6", "llama3_1", "llama3_2", "deepseekv3", "gemma3", "glm4moe", "gptoss")


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trl")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={directory}", PACKAGE]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{PACKAGE} cannot be installed here: {error}")
    return directory / "trl" / "chat_templates"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_name_promises_no_wrong_token(
    name: str,
    templates: Path,
    short_steps: Callable[[int], None],  # noqa: F811
) -> None:
    short_steps(16)
    # The demo model has no BOS, and some templates write one
    check_names(Node((templates / f"{name}.jinja").read_text(), bos="[INST]"), random.Random(name))


def test_no_template_loses_a_mark(templates: Path) -> None:
    tokenizer = Node("").tokenizer
    tokenizer.bos_token = tokenizer.eos_token = "[INST]"
    files = [file for file in sorted(templates.glob("*.jinja")) if not file.stem.endswith("_training")]
    assert len(files) > 40
    assert {file.stem: lost for file in files if (lost := lost_marks(tokenizer, file.read_text()))} == {}
