"""What a model's files are, told by their names before anything starts: a model to serve, or what it is instead.

The names come from a directory, or from the list of a hub's repository before its weights are downloaded.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError
from pd_cluster.models.checkpoint_files import (
    INDEX,
    SINGLE,
    check_content,
    complete_shards,
    read_header,
    shards_of_index,
    some,
    weight_files,
)
from pd_cluster.models.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

_TAKE = "take the model's repository that has config.json and safetensors"
_ADAPTER = "is an adapter (LoRA), not a model: give its base model, and the adapter by --lora NAME=DIR"
_PYTORCH = (
    "has weights in PyTorch's own form, which is not read because loading it may run code: convert it where you trust "
    "its origin, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW), and copy the tokenizer's files"
)
_MAKERS = f"has weights in their maker's own form (params.json, consolidated.*), with other names: {_TAKE}"
_FORMS = {
    "*.gguf": "GGUF", "*.onnx": "ONNX", "*.nemo": "NeMo", "*.h5": "TensorFlow", "*.msgpack": "Flax", "*.npz": "MLX",
    "openvino_model.*": "OpenVINO",
}  # fmt: skip
# Pattern of a name -> what files with such a name are, if they are no model to serve. The first that fits is told.
_WHAT = {
    "model_index.json": "is a pipeline of diffusers (images): only models that write text are served",
    "adapter_config.json": _ADAPTER,
    "adapter_model.*": _ADAPTER,
    "model-*-of-*.safetensors": f"lacks shards of its weights, and {INDEX}: download it again",
    "params.json": _MAKERS,
    "consolidated*": _MAKERS,
    **{form: f"has weights in the form of {name}, which is not read: {_TAKE}" for form, name in _FORMS.items()},
    "*.safetensors": f"has safetensors of another name: weights are read from {SINGLE} or what {INDEX} names",
    **dict.fromkeys(("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt"), _PYTORCH),
}
_PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_PIECES_NEED = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}  # package -> module
_OTHER_TOKENIZERS = ("vocab.json", "vocab.txt")
_FOREIGN = ("tekken.json", "tiktoken.model", "*.tiktoken")
_CODE = "tokenization_*.py"  # Kimi's, beside tiktoken.model
TEXTS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", INDEX, *_PIECES,
)  # fmt: skip
_COPY = "copy tokenizer.json and tokenizer_config.json of the model to it"


def file_problem(path: Path) -> str:
    """What a file is that was given in place of a directory."""
    if path.suffix == ".gguf":
        return f"{path} is a file in the form of GGUF, which is not read: {_TAKE}"
    what = "of weights: give the directory" if path.suffix == ".safetensors" else "and no model directory: give one"
    return f"{path} is a file {what} with config.json, weights and tokenizer"


def names_in(directory: Path) -> list[str]:
    """The files of a directory, and where folders below have a config.json. Raises StartupError."""
    try:
        names = [path.name for path in directory.iterdir()]
        below = ("*/config.json", "snapshots/*/config.json", "onnx/*.onnx")
        return names + sorted(str(path.relative_to(directory)) for form in below for path in directory.glob(form))
    except OSError as error:
        raise StartupError(f"{directory} cannot be read: {error.strerror}") from error


def layout_problem(names: Collection[str]) -> str:
    """What these names are, if not a model to serve: words to write after the place. "": they may be one."""
    has_config, is_whole = "config.json" in names, INDEX in names or SINGLE in names or bool(complete_shards(names))
    if has_config and is_whole:
        return ""
    if not is_whole and (what := next((_WHAT[form] for form in _WHAT if any(fnmatch(n, form) for n in names)), "")):
        return what
    if has_config:
        return "has no .safetensors file"
    below = [name.rpartition("/")[0] for name in names if name.endswith("/config.json")]
    hint = f"; it has one in {some(below)}: give that directory" if below else "" if names else "; it is empty"
    return f"is not a model directory: it has no config.json{hint}"


def tokenizer_problem(names: Collection[str], has_module: Callable[[str], bool]) -> str:
    """As `layout_problem`. `has_module`: whether Python finds a module."""
    if "tokenizer.json" in names:
        return ""
    if pieces := [name for name in _PIECES if name in names]:
        missing = [package for package, module in _PIECES_NEED.items() if not has_module(module)]
        what = f"has its tokenizer in {pieces[0]} alone: pip install {' '.join(missing)}, or {_COPY}, as grammars need"
        return what if missing else ""
    if any(name in names for name in _OTHER_TOKENIZERS):
        return ""
    if code := [name for name in names if fnmatch(name, _CODE)]:
        return f"has its tokenizer as code alone ({code[0]}), which is never run: {_COPY}"
    if foreign := [name for name in names if any(fnmatch(name, form) for form in _FOREIGN)]:
        return f"has its tokenizer in {foreign[0]} alone, which is not read: {_COPY}"
    return f"has no tokenizer: {_COPY}"


def directory_problem(directory: Path) -> str:
    """Why a directory is no model directory at all: it has no config.json. "": it has one. Raises StartupError."""
    names = names_in(directory)
    return "" if "config.json" in names else f"{directory} {layout_problem(names)}{_base_of(directory)}"


def check_texts(directory: Path) -> None:
    """Raises StartupError for a file beside the weights that cannot be read, or only points to its content."""
    names = names_in(directory)
    for name in TEXTS:
        if name in names:
            check_content(directory / name)


def content_problems(directory: Path, has_module: Callable[[str], bool], *, needs_index: bool) -> Iterator[str]:
    """What weights and tokenizer lack. Of weights the headers are read, which takes milliseconds.

    `has_module`: whether Python finds a module. `needs_index`: shards without an index cannot be read. Raises
    StartupError for a file that is not what its name says.
    """
    names = names_in(directory)
    if what := layout_problem(names):
        yield f"{directory} {what}{_base_of(directory)}"
        return
    if needs_index and not {INDEX, SINGLE} & set(names):
        yield f"{directory} lacks {INDEX}, without which transformers' modules read no shards: download it again"
        return
    if INDEX in names:
        shards = shards_of_index(directory / INDEX)
        if absent := [name for name in shards if not (directory / name).exists()]:
            yield f"{directory} lacks {some(absent)}, which {INDEX} names: download the model again"
            return
    for file in weight_files(directory):
        read_header(file)
    if what := tokenizer_problem(names, has_module):
        yield f"{directory} {what}"


def _base_of(directory: Path) -> str:
    """Names the base model of an adapter."""
    file = directory / "adapter_config.json"
    base = read_json(file).get("base_model_name_or_path") if file.is_file() else ""
    return f" (its base model: {base})" if base else ""
