"""The header of an adapter's file: nothing in it is passed over."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from pd_cluster.adapters.tensor_table import MAX_HEADER_BYTES, MAX_TENSORS, read_table
from pd_cluster.errors import BadAdapter
from tests.cluster import ROOT
from tests.deadlines import COMMAND_S
from tests.models.first_reads import PROCESSES

FILE = Path("adapter_model.safetensors")
A, B = (
    {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]},
    {"dtype": "F16", "shape": [2, 1], "data_offsets": [8, 12]},
)


def packed(header: str | dict[str, Any], data: int = 12) -> bytearray:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + bytes(data))


def test_threads_may_read_their_first_adapters_at_once() -> None:
    """Two of an engine did, and it ended by a segmentation fault."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.first_reads"], capture_output=True, text=True, cwd=ROOT, timeout=COMMAND_S
    )
    assert json.loads(done.stdout) == {"0": PROCESSES}, done.stderr


def test_tables_are_those_of_the_library() -> None:
    tensors = {
        "a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, 1).half(), "c": torch.ones(1, 5).bfloat16(),
        "bias": torch.ones(7),
    }  # fmt: skip
    content = bytearray(save(tensors, {"format": "pt"}))
    table = read_table(content, FILE)
    assert {name: one.shape for name, one in table.items()} == {name: tuple(one.shape) for name, one in tensors.items()}
    for name, one in table.items():
        raw = torch.frombuffer(content, dtype=torch.uint8, count=one.num_bytes, offset=one.start)
        assert torch.equal(raw, tensors[name].contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is cut: it has 0 bytes"),
        (b"\x05\0\0", "is cut"),
        (packed({"a": A, "b": B}, 11), "is cut: it has"),
        (packed({"a": A, "b": B}, 13), "1 bytes that belong to no tensor"),
        (packed({"a": A, "b": B})[:30], "its header alone needs"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "or its header is above 4194304 bytes"),
        (packed("[]"), "does not hold a JSON object"),
        (packed("{"), "is not JSON"),
        (packed("[" * 100_000), "is not JSON"),
        (packed('{"a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, NaN]}}'), "NaN is no number"),
        (packed(f'{{"a": {json.dumps(A)}, "a": {json.dumps(A)}}}', 8), "'a' is there twice"),
        (packed({"a": 3}), "does not describe a"),
        (packed({"a": {**A, "more": 1}}), "does not describe a"),
        (packed({"a": {**A, "dtype": "F8_E4M3"}}), "does not describe a: Invalid enum value 'F8_E4M3'"),
        (packed({"a": {**A, "shape": []}}), "does not describe a: Expected `array`"),
        (packed({"a": {**A, "shape": [0], "data_offsets": [0, 0]}}), "a is empty, as in files that DeepSpeed's ZeRO-3"),
        (packed({"a": {**A, "shape": [0, 2]}}), "a is empty"),
        (packed({"a": {**A, "shape": [-1, -2]}}), "does not describe a: Expected `int` >= 0 - at `$.shape[0]`"),
        (packed({"a": {**A, "shape": [1] * 9}}), "does not describe a: Expected `array` of length"),
        (packed({"a": {**A, "shape": [1 << 62, 1 << 62]}}), "8 bytes, and its shape needs"),
        (packed({"a": {**A, "data_offsets": [0, 12]}}), "12 bytes, and its shape needs 8"),
        (packed({"a": {**A, "data_offsets": [-8, 0]}}), "does not describe a: Expected `int` >= 0"),
        (packed({"a": A, "b": {**B, "data_offsets": [4, 8]}}), "what is before it ends at"),
        (packed({"a": A, "b": {**B, "data_offsets": [9, 13]}}, 13), "what is before it ends at"),
        (packed({"n" * 513: A}), "513 characters, and 512 are allowed"),
        (packed({f"{n}": A for n in range(MAX_TENSORS + 1)}), "16385 tensors, and 16384 are allowed"),
    ],
)
def test_a_file_that_is_not_whole_or_says_two_things_is_refused(content: bytes, told: str) -> None:
    with pytest.raises(BadAdapter, match=re.escape(told)):
        read_table(bytearray(content), FILE)


@pytest.mark.long
def test_no_cut_and_no_changed_byte_of_a_header_fails_otherwise() -> None:
    """Each is refused or read; bytes of numbers alone may be anything."""
    content = bytearray(save({"a": torch.ones(2, 3), "b": torch.ones(3, 2).half()}))
    size = 8 + int.from_bytes(content[:8], "little")
    for end in range(len(content)):
        with pytest.raises(BadAdapter):
            read_table(content[:end], FILE)
    for place in range(size):
        for flip in (1, 2, 32, 128):
            changed = bytearray(content)
            changed[place] ^= flip
            try:
                table = read_table(changed, FILE)
            except BadAdapter:
                continue
            assert sum(one.num_bytes for one in table.values()) == len(content) - size
