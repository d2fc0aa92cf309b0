"""How many files a chat goes through (`python -m benchmarks request_path`), and how a stay is counted."""

from __future__ import annotations

import pytest

from benchmarks.request_path import PARTS, EnteredFile, FileStay, path_of_chat, stays_of

MOST_FILES, MOST_RETURNS = 9, 0  # of the work
MOST_STAYS = 37  # of the body and the work; two of them find the adapter that the model's name means


@pytest.mark.long
@pytest.mark.parametrize("streamed", [True, False])
def test_a_chat_goes_through_few_files(streamed: bool) -> None:
    body, work, _ = path_of_chat(streamed=streamed).values()
    files = {stay.file for stay in work}
    assert len(files) <= MOST_FILES, work
    assert len(work) - len(files) <= MOST_RETURNS, work
    assert len(body) + len(work) <= MOST_STAYS, body


def test_a_file_that_is_entered_again_is_another_stay() -> None:
    entries = [
        EnteredFile("a.py", "f"),
        EnteredFile("a.py", "g"),
        EnteredFile("a.py", "f"),
        EnteredFile("b.py", "f"),
        EnteredFile("a.py", "g"),
    ]
    assert stays_of(entries) == [FileStay("a.py", ("f", "g")), FileStay("b.py", ("f",)), FileStay("a.py", ("g",))]


@pytest.mark.long
def test_the_parts_are_the_whole_way() -> None:
    parts = path_of_chat(streamed=True)
    assert tuple(parts) == PARTS
    assert parts["the body"][0].file == "routes/endpoints.py"
    assert parts["the answer"][-1].file == "node/node_role.py"
    with pytest.raises(ValueError, match="nowhere was not called"):
        path_of_chat(streamed=True, start="nowhere")
