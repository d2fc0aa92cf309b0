"""Workers with an fp8 cache: the model over rounded keys and values, the same on every path, in fewer bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig
from pd_cluster.errors import StartupError
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, BlockCopies, SequenceChunk, SequenceStart
from pd_cluster.worker.capacity import decide_capacity
from pd_cluster.worker.model_loading import describe_model, resolve_kv_dtype
from pd_connectors.block_staging import BlockStaging, Inlet
from tests.worker.conftest import VOCAB_SIZE
from tests.worker.driver import GREEDY, Driver, make_executor, random_prompts
from tests.worker.tables import table
from tests.worker.test_capacity import BF16, H200, SPECS

if TYPE_CHECKING:
    from pd_cluster.worker.device_executor import DeviceExecutor
    from tests.worker.conftest import ModelStore, SavedModel

PROMPT = random_prompts([45], VOCAB_SIZE)[0]
TOLERANCE = 2e-2  # a number next to the middle of two e4m3 numbers may be rounded otherwise: one 16th of its size


class RoundingCache(DynamicCache):  # type: ignore[misc]
    """Transformers' cache, of keys and values that e4m3 has."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rounded = (x.clamp(-448, 448).to(torch.float8_e4m3fn).float() for x in (key, value))
        return super().update(*rounded, *args, **kwargs)


def make_fp8(models: ModelStore, name: str = "llama", **options: Any) -> DeviceExecutor:
    return make_executor(models.get(name).directory, kv_cache_dtype="fp8", **options)


def logprobs(saved: SavedModel, ids: list[int], cache: DynamicCache) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = saved.model(torch.tensor([ids]), past_key_values=cache).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.slow_cases
@pytest.mark.parametrize("budget", [1, 16, 512])
@pytest.mark.parametrize("name", ["llama", "qwen3-some-windows", "gemma3"])
def test_logprobs_equal_transformers_over_rounded_keys_and_values(models: ModelStore, name: str, budget: int) -> None:
    """Of a prompt in one piece too: its tokens attend to each other as they lie in the cache."""
    saved = models.get(name)
    driver = Driver(make_fp8(models, name), budget=budget)
    generation = driver.add(PROMPT, SamplingParams(max_tokens=6, temperature=0.0, logprobs=5))
    driver.run()
    ids = generation.all_ids
    expected = logprobs(saved, ids, RoundingCache(config=saved.model.config))
    exact = saved.logprobs(ids)
    found = torch.tensor([token.logprob for token in generation.tokens])
    rows = range(44, 44 + len(found))
    error, rounding = (
        max(abs(found[i] - table[row, ids[row + 1]]).item() for i, row in enumerate(rows))
        for table in (expected, exact)
    )
    assert error < TOLERANCE < 0.1 < rounding


def test_chunks_prefixes_and_preemption_change_no_token(models: ModelStore) -> None:
    prompts = random_prompts([20, 60, 33, 5], VOCAB_SIZE, seed=4)
    alone = []
    for prompt in prompts:
        driver = Driver(make_fp8(models))
        driver.add(prompt)
        alone += driver.run()
    driver = Driver(make_fp8(models), budget=23)
    generations = [driver.add(prompt) for prompt in prompts]
    for _ in range(8):
        driver.step()
    driver.preempt(generations[2])
    warm = driver.add(prompts[1], prefix_of=generations[1])
    assert warm.computed == 48
    assert driver.run() == [*alone, alone[1]]


def test_swaps_copies_and_old_content_change_no_token(models: ModelStore) -> None:
    executor, prompt = make_fp8(models), PROMPT[:20]
    driver = Driver(executor)
    driver.add(prompt)
    expected = driver.run()[0]
    executor.cache.tensors[0].fill_(torch.nan)
    start = SequenceStart(0, tuple(prompt), 20, table((1, 2)), GREEDY, 0)
    first = executor.launch(Batch(0, (start,), (SequenceChunk(0, 0, 20, num_samples=1),))).result().samples[0][0]
    executor.launch(Batch(1, departures=(0,), copies=BlockCopies(swap_out=((0, 1, 3), (0, 2, 0))))).result()
    executor.cache.tensors[0].fill_(torch.nan)
    back = SequenceStart(0, (*prompt, first.token_id), 20, table((7, 6)), GREEDY, 0)
    chunk = SequenceChunk(0, 20, 1, new_blocks=table((6,), 1), num_samples=1)
    copies = BlockCopies(swap_in=((0, 3, 7), (0, 0, 5)), copy_on_write=((0, 5, 6),))
    second = executor.launch(Batch(2, (back,), (chunk,), copies=copies)).result().samples[0][0]
    assert [first.token_id, second.token_id] == expected[:2]


def test_blocks_of_another_node_give_its_tokens(models: ModelStore) -> None:
    """Through the staging of pools: bytes out of one cache, and into another one."""
    prefill, decode = make_fp8(models), make_fp8(models)
    driver = Driver(prefill)
    driver.add(PROMPT)
    expected = driver.run()[0]
    blocks = driver.sequences[0].blocks[:3]
    staged, inlet = BlockStaging(prefill.cache.tensors[0]).gather(blocks), Inlet(decode.cache)
    for index in range(3):
        inlet.write(0, slice(None), 10 + index, staged.block(index, slice(None)))
    start = SequenceStart(0, (*PROMPT, expected[0]), 45, table((10, 11, 12)), GREEDY, 0)
    samples = decode.launch(Batch(0, (start,), (SequenceChunk(0, 45, 1, num_samples=1),))).result().samples
    assert samples[0][0].token_id == expected[1]


def test_fewer_bytes_and_another_meaning(models: ModelStore) -> None:
    directory = models.get("llama").directory
    plain, fp8 = (make_executor(directory, dtype="bfloat16", kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    assert [group.dtype for group in fp8.layout.groups] == ["float8_e4m3fn"]
    assert 2 * fp8.layout.block_bytes == plain.layout.block_bytes
    assert 2 * fp8.cache.tensors[0].nbytes == plain.cache.tensors[0].nbytes
    prints = [
        describe_model(
            ModelConfig(model=str(directory), kv_cache_dtype=kv, dtype=dtype), torch.device("cpu"), print
        ).fingerprint
        for dtype, kv in (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8"), ("float32", "fp8"))
    ]
    assert prints[:3] == [plain.model.fingerprint, plain.model.fingerprint, fp8.model.fingerprint]
    assert len(set(prints)) == 3, "the layout of an fp8 cache does not tell the weights' dtype"


def test_a_gpu_has_room_for_twice_the_sequences() -> None:
    def seqs(kv_cache_dtype: str) -> int:
        config = NodeConfig(model=ModelConfig(kv_cache_dtype=kv_cache_dtype), cache=CacheConfig(gpu_share=0.25))
        return decide_capacity(config, SPECS["8b"], BF16, int(H200)).max_num_seqs

    assert (seqs("auto"), seqs("fp8")) == (96, 192)


def test_a_gpu_that_converts_no_e4m3_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device, spec = torch.device("cuda", 0), SPECS["8b"]
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    assert resolve_kv_dtype("fp8", "bfloat16", spec, device) == "float8_e4m3fn"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    assert resolve_kv_dtype("auto", "bfloat16", spec, device) == "bfloat16"
    with pytest.raises(
        StartupError, match=r"^--kv-cache-dtype fp8 needs a GPU of compute capability 8\.9 or .* not 8\.0"
    ):
        resolve_kv_dtype("fp8", "bfloat16", spec, device)
