"""What a model's files say about what it is served for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.errors import StartupError, UnservedModel
from pd_cluster.models.model_task import ModelTask, read_task

if TYPE_CHECKING:
    from pathlib import Path

LAST = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}
TOKENS = {"true_token_id": 9, "false_token_id": 2}


def save(directory: Path, modules: dict[str, str] | str, **configs: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 8}))
    listed = modules
    if not isinstance(modules, str):
        listed = json.dumps([{"type": f"any.package.{kind}", "path": path} for kind, path in modules.items()])
    (directory / "modules.json").write_text(str(listed))
    for name, config in configs.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(config))
    return directory


def test_without_a_list_of_modules(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    found = {wanted: read_task(wanted, tmp_path) for wanted in ("auto", "generate", "embed", "score")}
    assert found["auto"] == found["generate"] == ModelTask("generate", 8)
    assert found["embed"] == ModelTask("embed", 8, is_normed=True)
    assert found["score"] == ModelTask("score", 8)


@pytest.mark.parametrize("pooling", [LAST, {"pooling_mode": "lasttoken"}])
def test_an_embedder(tmp_path: Path, pooling: dict[str, Any]) -> None:
    save(tmp_path, {"Transformer": "", "Pooling": "pool", "Normalize": "norm"}, pool=pooling)
    assert read_task("auto", tmp_path) == ModelTask("embed", 8)
    assert read_task("generate", tmp_path) == ModelTask("generate", 8)


def test_vectors_that_are_not_normed(tmp_path: Path) -> None:
    save(tmp_path, {"Transformer": "", "Pooling": "pool"}, pool=LAST)
    assert read_task("auto", tmp_path) == ModelTask("embed", 8, is_normed=False)


@pytest.mark.parametrize("pooling", [LAST | {"pooling_mode_cls_token": True}, {"pooling_mode": "mean"}, {}])
@pytest.mark.parametrize("task", ["auto", "embed"])
def test_other_poolings_are_not_served(tmp_path: Path, pooling: dict[str, Any], task: str) -> None:
    save(tmp_path, {"Pooling": "pool"}, pool=pooling)
    with pytest.raises(UnservedModel, match="only the last token"):
        read_task(task, tmp_path)


def test_a_layer_after_the_pooling_is_not_served(tmp_path: Path) -> None:
    save(tmp_path, {"Pooling": "pool", "Dense": "dense"}, pool=LAST)
    with pytest.raises(UnservedModel, match="Dense"):
        read_task("auto", tmp_path)


@pytest.mark.parametrize("tokens", [TOKENS, {"true_token_id": 9, "false_token_id": None}])
def test_a_reranker(tmp_path: Path, tokens: dict[str, Any]) -> None:
    save(tmp_path, {"Transformer": "", "LogitScore": "score"}, score=tokens)
    assert read_task("auto", tmp_path) == ModelTask("score", 8, yes_id=9, no_id=tokens["false_token_id"])


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"type": "x"}]', "5"])
def test_a_list_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    save(tmp_path, text)
    if text == "{}":
        assert read_task("auto", tmp_path).name == "generate"
        return
    with pytest.raises(StartupError, match=r"modules\.json"):
        read_task("auto", tmp_path)


def test_files_that_the_list_names_must_be_there(tmp_path: Path) -> None:
    save(tmp_path, {"Pooling": "pool"})
    with pytest.raises(StartupError, match=r"config\.json"):
        read_task("auto", tmp_path)
