"""What a model's files are is told in one line before any process starts, by every command alike."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

from pd_cluster.config import ModelConfig, NodeConfig
from pd_cluster.errors import StartupError
from pd_cluster.launch.check import Verdict, check_model
from pd_cluster.launch.cli import main
from pd_cluster.launch.model_path import DEMO_MODEL
from pd_cluster.launch.on_ray.spec import check_models, read_spec
from pd_cluster.launch.preflight import MachineFacts, model_problems
from pd_cluster.models.checkpoint_files import weight_files
from pd_cluster.models.model_files import layout_problem, tokenizer_problem
from tests.worker.driver import Driver, make_executor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 998\n"
DEMO_CONFIG = json.loads((DEMO_MODEL / "config.json").read_text())
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
BERT = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 30522}
NOT_READ = "which is not read"

Files = dict[str, Any]  # by name: bytes, what JSON holds, or None for the demo model's own file
CONFIG: Files = {"config.json": None}
TEXTS: Files = {**CONFIG, **dict.fromkeys(TOKENIZER)}
WHOLE: Files = {**TEXTS, "model.safetensors": None}


def make(directory: Path, files: Files) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            shutil.copy(DEMO_MODEL / name, path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return directory


# What is given, what is said of it: all of these words
ROWS: dict[str, tuple[Files, tuple[str, ...]]] = {
    "empty": ({}, ("no config.json; it is empty",)),
    "gguf": ({"model-Q4_K_M.gguf": b"GGUF"}, ("form of GGUF", NOT_READ, "safetensors")),
    "gguf with config": ({**CONFIG, "ggml-model-q8_0.gguf": b"GGUF"}, ("form of GGUF", NOT_READ)),
    "mistral": ({"params.json": {}, "consolidated.safetensors": b"", "tekken.json": {}}, ("params.json",)),
    "meta": ({"params.json": {}, "consolidated.00.pth": b"", "tokenizer.model": b""}, ("params.json", "config.json")),
    "adapter": (
        {"adapter_config.json": {"base_model_name_or_path": "org/base"}, "adapter_model.safetensors": b""},
        ("adapter", "--lora", "org/base"),
    ),
    "adapter with config": ({**CONFIG, "adapter_config.json": {}, "adapter_model.bin": b""}, ("adapter", "--lora")),
    "diffusers": ({"model_index.json": {}, "unet/config.json": {}}, ("diffusers", "images")),
    "onnx": ({"model.onnx": b""}, ("form of ONNX", NOT_READ)),
    "onnx with config": ({**TEXTS, "onnx/model_q4.onnx": b""}, ("form of ONNX", NOT_READ)),
    "no config": ({"model.safetensors": None, **dict.fromkeys(TOKENIZER)}, ("it has no config.json",)),
    "one level too high": ({"v1/config.json": {}, "v2/config.json": {}}, ("v1, v2: give that directory",)),
    "a hub's cache": ({"refs/main": b"a", "snapshots/abc/config.json": {}}, ("snapshots/abc: give that directory",)),
    "config: pointer": ({"config.json": LFS}, ("config.json is a git-lfs pointer", "git lfs pull")),
    "config: not JSON": ({"config.json": b"{"}, ("cannot read", "config.json")),
    "config: a list": ({"config.json": []}, ("config.json does not hold a JSON object",)),
    "config: no architecture": ({"config.json": {"model_type": "llama"}}, ("architecture none named is not served",)),
    "bin": ({**TEXTS, "pytorch_model.bin": b""}, ("PyTorch's own form", NOT_READ, "save_pretrained")),
    "shards of bin": (
        {**TEXTS, "pytorch_model-00001-of-00002.bin": b"", "pytorch_model.bin.index.json": {}},
        ("PyTorch's own form", NOT_READ, "save_pretrained"),
    ),
    "pth": ({**TEXTS, "model.pth": b""}, ("PyTorch's own form", NOT_READ)),
    "tensorflow": ({**TEXTS, "tf_model.h5": b""}, ("form of TensorFlow", NOT_READ)),
    "flax": ({**TEXTS, "flax_model.msgpack": b""}, ("form of Flax", NOT_READ)),
    "npz": ({**TEXTS, "weights.npz": b""}, ("form of MLX", NOT_READ)),
    "no weights": (TEXTS, ("has no .safetensors file",)),
    "consolidated beside a config": ({**TEXTS, "consolidated.safetensors": b""}, ("consolidated", "other names")),
    "another name": ({**TEXTS, "weights.safetensors": b""}, ("another name", "model.safetensors")),
    "a part of the shards": ({**TEXTS, "model-00002-of-00002.safetensors": b""}, ("lacks shards", "download")),
    "a missing shard": (
        {**TEXTS, "model.safetensors.index.json": INDEX, "model-00001-of-00002.safetensors": b""},
        ("lacks model-00002-of-00002.safetensors", "download"),
    ),
    "index: pointer": ({**TEXTS, "model.safetensors.index.json": LFS}, ("index.json is a git-lfs pointer",)),
    "index: no map": ({**TEXTS, "model.safetensors.index.json": {}}, ("has no weight_map",)),
    "weights: pointer": ({**TEXTS, "model.safetensors": LFS}, ("model.safetensors is a git-lfs pointer",)),
    "weights: empty": ({**TEXTS, "model.safetensors": b""}, ("is not a safetensors file",)),
    "weights: a page": ({**TEXTS, "model.safetensors": b"<!doctype html>" * 9}, ("is not a safetensors file",)),
    "tokenizer: pointer": ({**WHOLE, "tokenizer.json": LFS}, ("tokenizer.json is a git-lfs pointer", "git lfs pull")),
    "tokenizer: not JSON": ({**WHOLE, "tokenizer.json": b"{"}, ("cannot read", "tokenizer.json")),
    "no tokenizer": ({**CONFIG, "model.safetensors": None}, ("has no tokenizer: copy tokenizer.json",)),
    "code": (  # Kimi's
        {**CONFIG, "model.safetensors": None, "tiktoken.model": b"", "tokenization_kimi.py": b""},
        ("tokenizer as code alone (tokenization_kimi.py), which is never run", "copy tokenizer.json"),
    ),
    "tekken": ({**CONFIG, "model.safetensors": None, "tekken.json": {}}, ("tekken.json alone", "copy tokenizer.json")),
    "tiktoken": ({**CONFIG, "model.safetensors": None, "qwen.tiktoken": b""}, ("qwen.tiktoken alone", "copy")),
    "bert": ({**TEXTS, "config.json": BERT, "model.safetensors": None}, ("BertForMaskedLM", "is an encoder:")),
    "sentence-transformers": (
        {"config.json": BERT | {"architectures": ["BertModel"]}, "modules.json": [], "model.safetensors": None},
        ("BertModel", "is an encoder:"),
    ),
    "modernbert": ({"config.json": {"architectures": ["ModernBertModel"], "model_type": "modernbert"}}, ("is an enc",)),
    "t5": (
        {"config.json": {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}},
        ("is an encoder-decoder",),
    ),
    "classifier": (
        {"config.json": DEMO_CONFIG | {"architectures": ["Qwen3ForSequenceClassification"]}}, ("is a classifier",)
    ),
    "vit": ({"config.json": {"architectures": ["ViTForImageClassification"], "model_type": "vit"}}, ("of images",)),
    "mlx": (
        {**WHOLE, "config.json": DEMO_CONFIG | {"quantization": {"group_size": 64, "bits": 4}}}, ("MLX's form",)
    ),
    "generation config": (
        {**WHOLE, "generation_config.json": {"eos_token_id": "2"}}, ("generation_config.json: eos_token_id must be",)
    ),
}  # fmt: skip


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_CLUSTER_KEY", "x")
    monkeypatch.setattr(
        MachineFacts, "has_module", lambda machine, name: name not in ("sentencepiece", "google.protobuf")
    )
    monkeypatch.setattr("pd_cluster.engine.process.spawn_engine", None)
    monkeypatch.setattr("pd_cluster.launch.supervise.Supervisor.start", None)


@pytest.fixture
def refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., set[str]]:
    """What each command says of --model, without the beginnings that tell where."""

    def told(model: str, commands: tuple[str, ...] = ("up", "mixed")) -> set[str]:
        found = check_model(NodeConfig(model=ModelConfig(model=model)))
        assert found.verdict is Verdict.FAIL, found
        said = {found.detail}
        capsys.readouterr()
        for command in commands:
            assert main([command, "--port=0", f"--model={model}"]) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1, error
            said.add(error.removeprefix("pd-cluster: error: ").strip())
        spec = tmp_path / "cluster.yaml"
        spec.write_text(json.dumps({"flags": {"model": model}, "mixed": {"count": 1}}))
        with pytest.raises(StartupError) as caught:
            check_models(read_spec(spec))
        return {*said, str(caught.value).removeprefix("flags of mixed: ")}

    return told


@pytest.mark.long_cases
@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("row", ROWS)
def test_what_it_is_and_what_to_do(row: str, tmp_path: Path, refusals: Callable[..., set[str]]) -> None:
    files, words = ROWS[row]
    [said] = refusals(str(make(tmp_path / "model", files)))
    assert all(word in said for word in words), said
    assert len(said) < 500


@pytest.mark.long_cases
@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no/such/directory", ("neither a directory nor a hub id",)),
        ("/nowhere", ("there is no such path",)),
        ("file.gguf", ("is a file in the form of GGUF",)),
        ("model.safetensors", ("is a file of weights: give the directory",)),
        ("notes.txt", ("is a file and no model directory",)),
    ],
)
def test_paths(path: str, words: tuple[str, ...], tmp_path: Path, refusals: Callable[..., set[str]]) -> None:
    if "/" not in path:
        (tmp_path / path).write_bytes(b"x")
        path = str(tmp_path / path)
    [said] = refusals(path, ("up", "prefill", "decode", "mixed"))
    assert all(word in said for word in words), said


@pytest.mark.long_cases
@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("cut", [1, 1000, 100_000])
def test_weights_that_are_cut(cut: int, tmp_path: Path, refusals: Callable[..., set[str]]) -> None:
    make(tmp_path / "model", WHOLE)
    file = tmp_path / "model" / "model.safetensors"
    num_bytes = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-cut])
    [said] = refusals(str(tmp_path / "model"))
    assert f"has only {num_bytes - cut} of its {num_bytes} bytes" in said


@pytest.mark.long
@pytest.mark.usefixtures("no_process")
def test_files_that_cannot_be_read(
    tmp_path: Path, refusals: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "model", WHOLE)
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "blob")  # as in a hub's cache
    [said] = refusals(str(tmp_path / "model"))
    assert "model.safetensors" in said
    monkeypatch.setattr("pathlib.Path.iterdir", lambda path: (_ for _ in ()).throw(PermissionError(13, "no access")))
    [said] = refusals(str(tmp_path / "model"))
    assert said.endswith("model cannot be read: no access")


def test_a_sentencepiece_tokenizer_needs_its_packages() -> None:
    for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"):
        for missing in ("sentencepiece", "google.protobuf"):
            said = tokenizer_problem(["config.json", name], missing.__ne__)
            assert f"{name} alone: pip install {missing.removeprefix('google.')}, or copy tokenizer.json" in said
            assert said.endswith("as grammars need")
        assert tokenizer_problem(["config.json", name], lambda module: True) == ""
    assert tokenizer_problem(["vocab.json", "merges.txt"], lambda module: False) == ""


def test_what_is_served_is_not_refused(tmp_path: Path) -> None:
    """Other forms of the weights beside those that are read do not matter."""
    others: Files = dict.fromkeys(("pytorch_model.bin", "consolidated.safetensors", "x.gguf", "params.json"), b"")
    directory = make(tmp_path, {**WHOLE, **others, "onnx/model.onnx": b"", "original/params.json": {}})
    assert list(model_problems(NodeConfig(), directory)) == []
    assert layout_problem(["config.json", "model.safetensors.index.json"]) == ""


@pytest.mark.long
def test_shards_without_an_index_are_served(tmp_path: Path) -> None:
    make(tmp_path, TEXTS)
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    names = sorted(tensors)
    for number in (1, 2, 3):
        part = {name: tensors[name] for name in names[number - 1 :: 3]}
        save_file(part, tmp_path / f"model-0000{number}-of-00003.safetensors")
    assert list(model_problems(NodeConfig(), tmp_path)) == []
    config = NodeConfig(model=ModelConfig(model_impl="transformers"))
    assert "lacks model.safetensors.index.json" in "".join(model_problems(config, tmp_path))
    assert len(weight_files(tmp_path)) == 3
    answers = []
    for directory in (tmp_path, DEMO_MODEL):
        executor = make_executor(directory)
        driver = Driver(executor)
        driver.add([5, 6, 7, 8])
        answers.append((driver.run(), executor.model.fingerprint))
        executor.close()
    assert answers[0] == answers[1]
