"""Contestants of `python -m benchmarks engine`: our engine and transformers, with equal weights, prompts and threads.

A contestant is built once, with its weights loaded, and called with lists of prompts. It returns the new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
import zmq

from benchmarks.offline import offline_context
from pd_cluster.config import CacheConfig, HandoffConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.engine.core import EngineCore
from pd_cluster.engine.ipc import EngineSockets
from pd_cluster.protocol.messages import AddRequest, FromEngine, RequestFailed, ToEngine, TokensOut
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_connectors.registry import create_connector

if TYPE_CHECKING:
    from pathlib import Path

ADDRESS = "inproc://bench-engine"
BLOCK_SIZE = 16
SPARE_BLOCKS = 2  # per sequence, so that nothing is preempted
TOKEN_BUDGET = 2048  # the default of --max-num-batched-tokens


@dataclass(frozen=True, slots=True)
class Task:
    """Size of the workload, and the number of threads."""

    num_requests: int
    input_len: int
    output_len: int
    threads: int


class Contestant(Protocol):
    """A way to generate."""

    name: str

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """`output_len` greedy tokens for every prompt, in its order."""

    def close(self) -> None:
        """Free its resources. Idempotent."""


def build_random_model(directory: Path, seed: int) -> int:
    """Write a random Llama (hidden 256, 4 layers, vocabulary 32000, fp32) for Hugging Face. Returns its size."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=False, dtype="float32",
        bos_token_id=None, eos_token_id=None,  # so that every output has its full length
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


class OurEngine:
    """The engine core in this process, with the message queues of an API process."""

    name = "pd-cluster engine"

    def __init__(self, directory: Path, task: Task) -> None:
        num_blocks = task.num_requests * ((task.input_len + task.output_len) // BLOCK_SIZE + SPARE_BLOCKS)
        config = NodeConfig(
            model=ModelConfig(model=str(directory), device="cpu", dtype="float32", num_threads=task.threads),
            cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(
                max_num_seqs=task.num_requests, max_num_batched_tokens=max(TOKEN_BUDGET, task.num_requests)
            ),
            handoff=HandoffConfig(connector="none"),
        )
        self._task = task
        self._round = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for socket, end in ((self._to_engine, "in"), (self._from_engine, "out")):
            socket.set_hwm(0)
            socket.bind(f"{ADDRESS}.{end}")
        self._mailbox = EngineSockets(self._context, ADDRESS)
        self._executor = DeviceExecutor.started(config, lambda text: None)
        connector = create_connector("none", offline_context(self._executor))
        connector.register_kv_cache(self._executor.cache)
        self._core = EngineCore(config, self._executor, connector, self._mailbox)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[FromEngine]] = msgspec.msgpack.Decoder(list[FromEngine])

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        self._round += 1
        sampling = SamplingParams(max_tokens=self._task.output_len, temperature=0.0, ignore_eos=True)
        ids = [f"{self._round}-{index}" for index in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            message: ToEngine = AddRequest(request_id, prompt, sampling)
            self._to_engine.send(self._encoder.encode(message))
        tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
        open_ids = set(ids)
        while open_ids:
            if not self._core.turn():
                self._mailbox.wait(0.01)
            self._collect(tokens, open_ids)
        return list(tokens.values())

    def close(self) -> None:
        self._mailbox.close()
        self._executor.close()
        self._context.destroy(linger=0)

    def _collect(self, tokens: dict[str, list[int]], open_ids: set[str]) -> None:
        while self._from_engine.poll(0):
            for message in self._decoder.decode(self._from_engine.recv()):
                if isinstance(message, RequestFailed):
                    raise RuntimeError(f"request {message.request_id}: {message.error}: {message.message}")
                if isinstance(message, TokensOut):
                    for part in message.sequences:
                        tokens[message.request_id] += [token.token_id for token in part.tokens]
                    if message.finished:
                        open_ids.discard(message.request_id)


class StaticTransformers:
    """`model.generate` on the whole batch at once: equal lengths, so without padding. Its best case."""

    name = "transformers generate, static batch"

    def __init__(self, directory: Path, task: Task) -> None:
        self._model = _load_transformers(directory)
        self._options = _generation_config(task)

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        inputs = torch.tensor(prompts)
        with torch.no_grad():
            out = self._model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=self._options)
        rows: list[list[int]] = out[:, inputs.shape[1] :].tolist()
        return rows

    def close(self) -> None:
        """There is nothing to free."""


class ContinuousTransformers:
    """`model.generate_batch`, transformers' own continuous batching over a paged cache."""

    name = "transformers continuous batching"

    def __init__(self, directory: Path, task: Task) -> None:
        self._model = _load_transformers(directory)
        self._options = _generation_config(task)

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        results = self._model.generate_batch(inputs=prompts, generation_config=self._options)
        return [list(result.generated_tokens) for result in results.values()]

    def close(self) -> None:
        """There is nothing to free."""


def _load_transformers(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def _generation_config(task: Task) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=task.output_len, do_sample=False, pad_token_id=0)
