"""The generated parts of the documents are those that the code gives."""

from __future__ import annotations

from importlib import import_module

import pytest

from docs.generate import matrix
from docs.generate.__main__ import PAGES, main, written
from docs.generate.document import ROOT, filled
from pd_cluster.models.registry import ARCHITECTURES, Architecture


@pytest.mark.parametrize("name", PAGES)
def test_documents_are_current(name: str) -> None:
    document, text = written(name)
    assert (ROOT / document).read_text() == text, f"run `python -m docs.generate {name}`"
    module = import_module(f"docs.generate.{name}")
    assert hasattr(module, "text") or module.PARTS


def test_only_generated_parts_change() -> None:
    text = "before\n<!-- generated: a -->\nold\n<!-- end -->\nafter\n"
    assert filled(text, {"a": lambda: "new\n"}) == "before\n<!-- generated: a -->\n\nnew\n\n<!-- end -->\nafter\n"
    with pytest.raises(ValueError, match="'a'"):
        filled(text, {"b": str})


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["other"])
    assert "unknown name other" in capsys.readouterr().err


def test_a_new_architecture_is_in_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    llama: Architecture = ARCHITECTURES["LlamaForCausalLM"]
    monkeypatch.setitem(ARCHITECTURES, "Olmo2ForCausalLM", llama)
    assert "Gemma 3 (text), Olmo2, mixtures of experts" in matrix.matrix()


def test_what_the_code_has_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "SETTINGS", matrix.SETTINGS | {"pp"})
    with pytest.raises(ValueError, match="pipeline parallelism"):
        matrix.matrix()


def test_every_body_field_belongs_to_a_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "BODY_FIELDS", matrix.BODY_FIELDS | {"new_field"})
    with pytest.raises(ValueError, match="new_field"):
        matrix.matrix()
