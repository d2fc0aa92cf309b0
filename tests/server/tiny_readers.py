"""Tiny random models in the form of Qwen3-Embedding and Qwen3-Reranker, and nodes that serve them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer

import pd_cluster
from pd_cluster.server.app import create_app
from pd_cluster.server.state import NodeState
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.engine.test_core_pipeline import CONFIG, make_connector
from tests.in_loop_engine import InLoopEngine
from tests.server.live_server import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pd_cluster.config import NodeConfig

DEMO = Path(pd_cluster.__file__).parent / "demo_model"
HIDDEN_SIZE = 48
MODULES = "sentence_transformers.models."


@dataclass(frozen=True)
class TinyReader:
    """A saved model, and the same under transformers."""

    directory: Path
    tokenizer: Any
    model: Any

    def vector(self, token_ids: list[int]) -> torch.Tensor:
        """The last token's state after the last norm."""
        with torch.inference_mode():
            state: torch.Tensor = self.model.model(torch.tensor([token_ids])).last_hidden_state[0, -1]
            return state

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([token_ids])).logits[0, -1]
            return logits


def save_reader(directory: Path, *, is_embedder: bool, seed: int = 3) -> TinyReader:
    """`is_embedder`: without a head and with sentence-transformers' files, and the tokenizer ends texts with EOS."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # 2 s of CPU, also where only names of tests are read

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=3072, hidden_size=HIDDEN_SIZE, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.15, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    (model.model if is_embedder else model).save_pretrained(directory)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | {"architectures": ["Qwen3ForCausalLM"]}))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, directory)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    if is_embedder:
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}},
        }
        save_modules(directory, Transformer="", Pooling="1_Pooling", Normalize="2_Normalize")
        modes = dict.fromkeys(("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens"), False)
        pooling = {f"pooling_mode_{mode}": value for mode, value in (modes | {"lasttoken": True}).items()}
        size = {"word_embedding_dimension": HIDDEN_SIZE, "include_prompt": True}
        save_module(directory, "1_Pooling", pooling | size)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return TinyReader(directory, AutoTokenizer.from_pretrained(str(directory)), model)


def save_modules(directory: Path, **paths: str) -> None:
    modules = [{"idx": i, "name": str(i), "path": paths[kind], "type": MODULES + kind} for i, kind in enumerate(paths)]
    (directory / "modules.json").write_text(json.dumps(modules))


def save_module(directory: Path, name: str, config: dict[str, Any]) -> None:
    (directory / name).mkdir()
    (directory / name / "config.json").write_text(json.dumps(config))


def reader_config(directory: Path, role: str = "mixed", task: str = "auto") -> NodeConfig:
    return replace(
        CONFIG,
        model=replace(CONFIG.model, model=str(directory), served_model_name=("demo",), task=task),
        cache=replace(CONFIG.cache, num_blocks=200, prefix_caching=True),
        scheduler=replace(CONFIG.scheduler, max_num_seqs=16, max_num_batched_tokens=512),
        server=replace(CONFIG.server, role=role, node_id=role),
    )


@dataclass(frozen=True)
class ReaderNode:
    """A node with a real engine in the test's event loop."""

    url: str
    state: NodeState
    engine: InLoopEngine


@contextlib.asynccontextmanager
async def reader_node(config: NodeConfig) -> AsyncIterator[ReaderNode]:
    executor = DeviceExecutor.started(config, lambda text: None)
    try:
        for connector in make_connector(executor):
            engine = InLoopEngine(config, executor, connector)
            running = asyncio.create_task(engine.run())
            state = NodeState.load(config, engine)
            async with serving(create_app(state)) as url:
                yield ReaderNode(url, state, engine)
                await engine.rest()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        executor.close()
