"""Gemma 3 27B's layers, narrow: D reads the windows of a long prompt, not all of it, and counts the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.number_model import save_tokenizer
from tests.integration.system import Path, System, running_system
from tests.worker.conftest import GEMMA3_ROPE, VOCAB_SIZE, save_model
from tests.worker.driver import random_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_LAYERS, WINDOW, BLOCK_SIZE, HEAD_DIM = 62, 1024, 64, 16
NUM_FULL = NUM_LAYERS // 6  # each sixth layer
LAYER_BYTES = 2 * BLOCK_SIZE * HEAD_DIM * 4  # of a block: K and V of one KV head in float32
LENGTHS = (1024, 32_768)
BYTES = "pd_kv_transfer_bytes_total"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("narrow")
    options = {
        "num_hidden_layers": NUM_LAYERS, "sliding_window": WINDOW, "hidden_size": 32, "intermediate_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "query_pre_attn_scalar": 20,
        "rope_parameters": GEMMA3_ROPE, "max_position_embeddings": 2 * LENGTHS[-1],
    }  # fmt: skip
    save_model("Gemma3", directory, options)
    save_tokenizer(directory)
    flags = (f"--model={directory}", f"--block-size={BLOCK_SIZE}", "--kv-cache-gb=0.5", "--max-num-batched-tokens=512")
    with running_system(*flags, "--load-deadline-s=600") as system:
        yield system


@pytest.mark.parametrize("length", LENGTHS)
def test_a_handover_moves_what_later_tokens_read(length: int, system: System) -> None:
    [prompt] = random_prompts([length], VOCAB_SIZE, seed=length)
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    before = system.metric("decode", BYTES)
    answer = system.ask(Path.P_FIRST, "/v1/completions", body)
    assert (answer.headers["x-pd-prefill"], answer.headers["x-pd-decode"]) == ("prefill", "decode")
    num_blocks = length // BLOCK_SIZE
    first = max(0, length - BLOCK_SIZE - WINDOW + 1) // BLOCK_SIZE  # what the boundary before the last block reads
    expected = LAYER_BYTES * (NUM_FULL * num_blocks + (NUM_LAYERS - NUM_FULL) * (num_blocks - first))
    system.settle()
    assert system.metric("decode", BYTES) - before == expected
    if length == LENGTHS[-1]:
        assert expected <= 0.2 * LAYER_BYTES * NUM_LAYERS * num_blocks
    alone = system.ask_node("prefill", "/v1/completions", body)
    assert alone.choices[0]["text"] == answer.choices[0]["text"]
