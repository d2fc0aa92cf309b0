"""What `--model OWNER/NAME` downloads: the files that are read, and nothing for what cannot be served."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import close_session, constants

from pd_cluster.errors import StartupError
from pd_cluster.launch.model_path import resolve_model
from tests.launch.hub_server import serving_hub

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = "owner/model"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TEXTS: dict[str, Any] = {"config.json": CONFIG, "tokenizer.json": {}, "tokenizer_config.json": {}}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = {"model.safetensors.index.json": {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}}
OTHERS = dict.fromkeys(
    (
        "README.md", "LICENSE", "figure.png", "training_args.json", "consolidated.safetensors", "params.json",
        "original/model.safetensors", "original/params.json", "original/consolidated.00.pth", "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "model.fp16.safetensors", "model.gguf",
        "onnx/model.onnx", "onnx/config.json", "tf_model.h5", "flax_model.msgpack", "modeling_model.py",
        "checkpoint-100/model.safetensors", "checkpoint-100/config.json", "preprocessor_config.json", "logs/events.txt",
    ),
    b"x" * 99,
)  # fmt: skip


@pytest.fixture
def download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], tuple[Path, set[str]]]:
    """Resolves the model of a hub with these files. -> its directory, and what was downloaded."""

    def of(files: dict[str, Any]) -> tuple[Path, set[str]]:
        for number, (name, content) in enumerate(files.items()):
            path = tmp_path / "repository" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
            path.write_bytes(encoded + b" " * number)  # the hub's cache has equal files once
        with serving_hub(MODEL, tmp_path / "repository") as hub:
            monkeypatch.setattr(constants, "ENDPOINT", hub.url)
            of_file = "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + of_file)
            monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
            start = f"GET /{MODEL}/resolve/"
            asked = hub.asked
            try:
                directory = resolve_model(MODEL)
            finally:
                of.found = {line.removeprefix(start).partition("/")[2] for line in asked if line.startswith(start)}  # type: ignore[attr-defined]
        return directory, of.found  # type: ignore[attr-defined]

    return of


@pytest.mark.long_cases
@pytest.mark.parametrize(
    "read",
    [
        {**TEXTS, **INDEX, **dict.fromkeys(SHARDS, b"w")},
        {**TEXTS, "model.safetensors": b"w"},
        {**TEXTS, **dict.fromkeys(SHARDS, b"w")},
        {**TEXTS, "model.safetensors": b"w", "generation_config.json": {}, "special_tokens_map.json": {},
         "added_tokens.json": {}, "chat_template.jinja": b"", "additional_chat_templates/tool_use.jinja": b"",
         "vocab.json": {}, "merges.txt": b"", "modules.json": [], "1_Pooling/config.json": {},
         "hf_quant_config.json": {}},
        {"config.json": CONFIG, "tokenizer.model": b"p", "tokenizer_config.json": {}, "model.safetensors": b"w"},
    ],
    ids=["index", "one file", "shards alone", "all texts", "pieces"],
)  # fmt: skip
def test_only_files_that_are_read_are_downloaded(
    read: dict[str, Any], download: Callable[[dict[str, Any]], tuple[Path, set[str]]]
) -> None:
    directory, downloaded = download({**OTHERS, **read})
    assert downloaded == set(read)
    assert {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()} == set(read)
    again, downloaded = download({})
    assert (again, downloaded) == (directory, set())


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({**TEXTS, "pytorch_model.bin": b"w"}, "owner/model on the hub has weights in PyTorch's own form"),
        ({"model-Q4_K_M.gguf": b"w", "README.md": b""}, "owner/model on the hub has weights in the form of GGUF"),
        ({"params.json": {}, "consolidated.safetensors": b"w", "tekken.json": {}}, "on the hub has weights in"),
        ({"adapter_config.json": {}, "adapter_model.safetensors": b"w"}, "owner/model on the hub is an adapter"),
        ({"model_index.json": {}, "unet/config.json": {}, "unet/diffusion.safetensors": b"w"}, "is a pipeline of diff"),
        ({"config.json": CONFIG, "model.safetensors": b"w"}, "owner/model on the hub has no tokenizer"),
        ({"config.json": CONFIG, "tekken.json": {}, "model.safetensors": b"w"}, "tekken.json alone"),
        ({**TEXTS, "config.json": {"architectures": ["BertModel"], "model_type": "bert"}, "model.safetensors": b"w"},
         "is an encoder"),
        ({**TEXTS, **INDEX, SHARDS[0]: b"w"}, f"lacks {SHARDS[1]}"),
    ],
)  # fmt: skip
def test_no_weight_of_what_is_not_served_is_downloaded(
    files: dict[str, Any], says: str, download: Callable[[dict[str, Any]], tuple[Path, set[str]]]
) -> None:
    with pytest.raises(StartupError, match=says) as caught:
        download(files)
    assert "\n" not in str(caught.value)
    assert b"w" not in [files.get(name) for name in download.found]  # type: ignore[attr-defined]


def test_without_a_connection_what_is_there_is_used(
    download: Callable[[dict[str, Any]], tuple[Path, set[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = download({**TEXTS, **INDEX, **dict.fromkeys(SHARDS, b"w"), **OTHERS})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(MODEL) == directory
    (directory / SHARDS[1]).unlink()
    with pytest.raises(StartupError, match="cannot be downloaded from the hub: ") as caught:
        resolve_model(MODEL)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "nonsense://x"])
def test_a_proxy_that_the_library_cannot_use_is_one_line(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    close_session()  # the library keeps its client
    with pytest.raises(StartupError, match="cannot be downloaded from the hub: ") as caught:
        resolve_model(MODEL)
    close_session()
    assert "\n" not in str(caught.value)
