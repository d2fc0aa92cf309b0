"""Answers of a fine-tune that has its base model's EOS in both configs, and the end of the turn in its tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import pd_cluster
from pd_cluster.server.app import create_app
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.engine.test_core_pipeline import CONFIG, make_connector
from tests.in_loop_engine import InLoopEngine
from tests.server.live_server import make_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.anyio, pytest.mark.long]
DEMO_MODEL = Path(pd_cluster.__file__).parent / "demo_model"
QUESTION = {"messages": [{"role": "user", "content": "Mira 4831. Oskar 2210. Lena 7745. Oskar?"}], "temperature": 0}
END = 2


@contextlib.asynccontextmanager
async def client_of(model: Path, lines: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    cache = replace(CONFIG.cache, num_blocks=60)
    config = replace(CONFIG, model=replace(CONFIG.model, model=str(model)), cache=cache)
    executor = DeviceExecutor.started(config, lines.append)
    with contextlib.closing(executor), contextlib.contextmanager(make_connector)(executor) as connector:
        engine = InLoopEngine(config, executor, connector)
        state = make_state(engine)  # type: ignore[arg-type]
        running = asyncio.create_task(engine.run())
        transport = httpx.ASGITransport(create_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            yield client
        await engine.rest()
        running.cancel()
        state.grammar_checks.close()
        state.tokenizer.close()


async def test_the_tokenizers_eos_ends_an_answer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3072]}))
    lines: list[str] = []
    async with client_of(model, lines) as client:

        async def ask(**fields: Any) -> tuple[str, str, int]:
            answer = await client.post("/v1/chat/completions", json={"model": "demo", **QUESTION, **fields})
            assert answer.status_code == 200, answer.text
            [choice], usage = answer.json()["choices"], answer.json()["usage"]
            return choice["message"]["content"], choice["finish_reason"], usage["completion_tokens"]

        text, reason, length = await ask(max_tokens=32)
        assert (text, reason, length < 32) == ("Oskar 2210", "stop", True)
        assert (await ask(max_tokens=32, ignore_eos=True))[1:] == ("length", 32)
        longer = await ask(max_tokens=32, min_tokens=length + 4)
        assert longer[2] >= length + 4
        choice = await ask(max_tokens=32, structured_outputs={"choice": ["Lena", "Mira"]})
        assert (choice[0] in ("Lena", "Mira"), choice[1]) == (True, "stop")
    ends = "answers end at the tokens 0 '<|endoftext|>', 2 '<|im_end|>'"
    left_out = "left out: generation_config.json: eos_token_id = 3072, which the vocabulary lacks"
    assert f"{ends}; {left_out}" in lines
