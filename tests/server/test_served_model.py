"""Flags about the served model: names, chat template, sampling; and web pages of other origins."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.config import ModelConfig, NodeHttpLimits
from pd_cluster.errors import StartupError
from pd_cluster.launch.flags import config_from
from pd_cluster.server.app import create_app
from pd_cluster.server.params.sampling import SamplingDefaults
from pd_cluster.server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import MODEL_DIR, make_state, running, serving

if TYPE_CHECKING:
    from pathlib import Path

    import aiohttp

HI = {"messages": [{"role": "user", "content": "hi"}]}
PAGE = {"origin": "https://page.example"}
PREFLIGHT = PAGE | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@pytest.mark.anyio
async def test_several_names_for_one_model() -> None:
    async with running(FakeEngine(says([5]))) as node:
        config = node.state.config
        node.state.config = replace(config, model=replace(config.model, served_model_name=("demo", "gpt-4o")))
        for name, status in (("demo", 200), ("gpt-4o", 200), ("", 200), ("other", 404)):
            async with node.session.post(f"{node.url}/v1/chat/completions", json=HI | {"model": name}) as response:
                assert response.status == status
                if status == 200:
                    assert (await response.json())["model"] == "demo"
        async with node.session.get(f"{node.url}/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["demo", "gpt-4o"]
        async with node.session.get(f"{node.url}/v1/models/gpt-4o") as response:
            assert (await response.json())["id"] == "gpt-4o"


@pytest.mark.long
@pytest.mark.anyio
async def test_a_chat_template_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    tokenizer = Tokenizer.load(MODEL_DIR, str(path))
    ids = await tokenizer.encode_chat([{"role": "user", "content": "hi"}], None, {}, max_tokens=100)
    tokenizer.close()
    assert tokenizer.text_of(ids) == "[hi]"
    path.write_text("{{ raise_exception('no') }}")
    Tokenizer.load(MODEL_DIR, str(path)).close()  # it may render other conversations
    path.write_text("{% for %}")
    for wrong in (path, tmp_path / "none"):
        with pytest.raises(StartupError, match="--chat-template"):
            Tokenizer.load(MODEL_DIR, str(wrong))


def test_the_source_of_sampling_defaults(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for directory, temperature in ((model, 0.6), (other, 0.3)):
        directory.mkdir()
        (directory / "generation_config.json").write_text(json.dumps({"temperature": temperature, "top_k": 20}))
    assert SamplingDefaults.choose("auto", model) == SamplingDefaults(temperature=0.6, top_k=20)
    assert SamplingDefaults.choose("none", model) == SamplingDefaults.choose("vllm", model) == SamplingDefaults()
    assert SamplingDefaults.choose(str(other), model).temperature == 0.3
    with pytest.raises(StartupError, match="--generation-config"):
        SamplingDefaults.choose(str(tmp_path), model)


async def shown(session: aiohttp.ClientSession, method: str, url: str, **kwargs: Any) -> tuple[int, str | None]:
    async with session.request(method, url, **kwargs) as answer:
        return answer.status, answer.headers.get("access-control-allow-origin")


@pytest.mark.long_cases
@pytest.mark.anyio
@pytest.mark.parametrize("allowed", [(), ("https://page.example",), ("*",), ("https://other.example",)])
async def test_pages_of_allowed_origins_may_call(allowed: tuple[str, ...]) -> None:
    state = make_state(FakeEngine(says([5])))
    state.config = replace(state.config, http=NodeHttpLimits(allowed_origins=allowed))
    may = PAGE["origin"] in allowed or "*" in allowed
    async with running(FakeEngine(says([5]))) as other, serving(create_app(state)) as url:
        status, origin = await shown(other.session, "OPTIONS", f"{url}/v1/chat/completions", headers=PREFLIGHT)
        assert (status == 200, origin is not None) == (may, may)
        for body, expected in ((HI, 200), (HI | {"stream": True}, 200), ({}, 400)):
            path = f"{url}/v1/chat/completions"
            status, origin = await shown(other.session, "POST", path, json=body, headers=PAGE)
            assert (status, origin in (PAGE["origin"], "*")) == (expected, may)
        assert await shown(other.session, "GET", f"{url}/health") == (200, None), "no page asks"


def test_names_are_given_one_after_the_other_or_by_several_flags() -> None:
    import argparse

    from pd_http.settings import add_flags

    parser = argparse.ArgumentParser()
    add_flags(parser, ModelConfig)
    for arguments in (["--served-model-name", "a", "b"], ["--served-model-name=a", "--served-model-name=b"]):
        assert config_from(parser.parse_args(arguments)).model.served_model_name == ("a", "b")
