"""Calls of the peers' clients about adapters, and files that cannot be served, before a router with real nodes.

Such a load is refused with its reason, and a stream that runs beside it goes on as if nothing had been asked.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from pd_cluster.adapters.adapter_bytes import read_adapter
from pd_http.endpoints import LOAD_PATH, UNLOAD_PATH
from tests.cluster import Launcher
from tests.deadlines import HANG_S
from tests.integration.strong_adapters import SIZES, strong_adapter
from tests.integration.system import System, running_system, wait_until
from tests.models.adapter_files import MAX_BYTES, PREFIX, pair
from tests.shallow_model import NUM_LAYERS, shallow_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
PROMPT = [(7 * i) % 3000 + 5 for i in range(40)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0}
QUESTION: Any = [{"role": "user", "content": "Hello"}]
WEIGHTS = "adapter_model.safetensors"
NUM_RACES = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("adapters") / "root"
    for seed, name in enumerate(("own", "a"), 1):
        strong_adapter(found / name, seed, NUM_LAYERS)
    return found


@pytest.fixture(scope="module")
def system(root: Path) -> Iterator[System]:
    flags = (f"--model={shallow_model()}", "--served-model-name=base", f"--lora=own={root / 'own'}",
             f"--lora-dir={root}", "--lora-slots=2", "--max-lora-rank=8")  # fmt: skip
    with running_system(*flags) as system:
        yield system


@pytest.fixture(scope="module")
def url(system: System) -> Iterator[str]:
    """Of a second router, of which orders need no signature."""
    with Launcher() as launcher:
        nodes = (f"--prefill={system.urls['prefill']}", f"--decode={system.urls['decode']}")
        yield launcher.router(*nodes, "--admin-endpoints=open").url


def call(url: str, path: str, **body: Any) -> httpx.Response:
    """As a client of vLLM sends it."""
    return httpx.post(url + path, json=body, timeout=HANG_S, trust_env=False)


def test_clients_of_openai_and_calls_of_vllm_need_no_change(url: str, root: Path) -> None:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=HANG_S, http_client=http) as client:
        assert call(url, LOAD_PATH, lora_name="tuned", lora_path="a").status_code == 200
        assert call(url, LOAD_PATH, lora_name="again", lora_path=str(root / "a")).status_code == 200
        assert {card.id: getattr(card, "parent", None) for card in client.models.list()} == {
            "base": None, "own": "base", "tuned": "base", "again": "base",
        }  # fmt: skip
        assert client.models.retrieve("tuned").id == "tuned"
        texts = {}
        for name in ("base", "own", "tuned", "again"):
            arguments: dict[str, Any] = BODY | {"model": name, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
            whole = client.completions.create(**arguments)
            chunks = list(client.completions.create(**arguments, stream=True))
            assert {whole.model, *(chunk.model for chunk in chunks)} == {name}
            texts[name] = whole.choices[0].text
            assert "".join(chunk.choices[0].text for chunk in chunks) == texts[name]
            chat: dict[str, Any] = {"model": name, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
            said = client.chat.completions.create(**chat).choices[0].message.content
            streamed = client.chat.completions.create(**chat, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == said
        assert texts["again"] == texts["tuned"]
        assert len(set(texts.values())) == 3
        for name in ("tuned", "again"):
            assert call(url, UNLOAD_PATH, lora_name=name).status_code == 200
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model=name, prompt=PROMPT)
        assert call(url, UNLOAD_PATH, lora_name="tuned").status_code == 404


def test_signed_commands(system: System, url: str) -> None:
    with Launcher() as launcher:

        def nodes(*arguments: str) -> tuple[int, str]:
            process = launcher.command("nodes", *arguments[:1], "--router", system.router_url, *arguments[1:])
            return process.wait(), process.output

        assert call(system.router_url, LOAD_PATH, lora_name="signed", lora_path="a").status_code == 401
        status, told = nodes("load-adapter", "signed", "a")
        assert (status, told.count("prefill: "), told.count("decode: ")) == (0, 1, 1)
        assert call(system.router_url, "/v1/completions", **BODY, model="signed").status_code == 200
        status, told = nodes("load-adapter", "signed", "own")
        assert (status, "load_inplace" in told) == (1, True)
        assert nodes("load-adapter", "signed", "own", "--in-place")[0] == 0
        assert nodes("unload-adapter", "signed")[0] == 0
        assert call(system.router_url, "/v1/completions", **BODY, model="signed").status_code == 404
        status, told = nodes("unload-adapter", "signed")
        assert (status, "404" in told) == (1, True)
        wait_until(lambda: "signed" not in names(url), lambda: str(names(url)))  # the other router hears of it


def names(url: str) -> list[str]:
    return [card["id"] for card in httpx.get(f"{url}/v1/models", timeout=HANG_S, trust_env=False).json()["data"]]


def _outside(directory: Path) -> None:
    strong_adapter(directory.parent.parent / "outside", 3, NUM_LAYERS)
    directory.symlink_to(directory.parent.parent / "outside")


def _linked_file(directory: Path) -> None:
    strong_adapter(directory.parent.parent / "outside", 3, NUM_LAYERS)
    strong_adapter(directory, 3, NUM_LAYERS)
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to(directory.parent.parent / "outside" / WEIGHTS)


def _shapes(directory: Path) -> None:
    changed(directory, lambda tensors: tensors.update(pair("model.layers.0.self_attn.q_proj", (512, 128))))


def _not_finite(directory: Path) -> None:
    name = f"{PREFIX}model.layers.1.mlp.down_proj.lora_B.weight"
    changed(directory, lambda tensors: tensors[name][0].fill_(float("nan")))


def _rank(directory: Path) -> None:
    parts = [(f"model.layers.{layer}.{module}", size) for layer in range(NUM_LAYERS) for module, size in SIZES.items()]
    wide = [pair(name, (num_out, num_in), rank=9) for name, (num_in, num_out) in parts]
    changed(directory, lambda tensors: [tensors.update(one) for one in wide], r=9)


def _cut(directory: Path) -> None:
    strong_adapter(directory, 3, NUM_LAYERS)
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:-1000])


def _pickle(directory: Path) -> None:
    strong_adapter(directory, 3, NUM_LAYERS)
    (directory / WEIGHTS).rename(directory / "adapter_model.bin")


def changed(directory: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: Any) -> None:
    """A good adapter, then this change of its tensors and its config."""
    from safetensors.torch import load_file, save_file

    strong_adapter(directory, 3, NUM_LAYERS)
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    told = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(told | config))


BAD: dict[str, tuple[Callable[[Path], object] | None, str]] = {  # what is made there, and what the refusal says
    "/etc": (None, "leads out of --lora-dir"),
    "../root/../outside": (None, "leads out of --lora-dir"),
    "absent": (None, "absent has no adapter_config.json"),
    "link": (_outside, "leads out of --lora-dir"),
    "linked file": (_linked_file, "leads out of --lora-dir"),
    "another base": (lambda directory: strong_adapter(directory, 3, NUM_LAYERS + 1), "the model has no such"),
    "shapes": (_shapes, "is of another base model"),
    "not finite": (_not_finite, "not finite"),
    "rank": (_rank, "rank 9, and 8 is the highest"),
    "truncated": (_cut, WEIGHTS),
    "pickle": (_pickle, "is a pickle, which can run any code"),
}


@pytest.fixture(scope="module")
def alone(url: str) -> str:
    """The stream's text when nothing else is asked."""
    return str(call(url, "/v1/completions", **BODY, model="own", ignore_eos=True).json()["choices"][0]["text"])


@pytest.mark.parametrize("path", BAD)
def test_what_cannot_be_loaded_is_named_and_disturbs_nothing(path: str, url: str, root: Path, alone: str) -> None:
    make, told = BAD[path]
    if make is not None:
        make(root / path)
    answer = beside_a_stream(url, alone, lambda: call(url, LOAD_PATH, lora_name="bad", lora_path=path))
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
    assert "bad" not in names(url)
    assert call(url, "/v1/completions", **BODY, model="bad").status_code == 404


def beside_a_stream(url: str, alone: str, ask: Callable[[], httpx.Response]) -> httpx.Response:
    """The answer to `ask`, which begins after the first token of a stream. Asserts that this is not disturbed."""
    body, text, answer = BODY | {"model": "own", "ignore_eos": True, "stream": True}, "", None
    with (
        httpx.Client(timeout=HANG_S, trust_env=False) as client,
        client.stream("POST", url + "/v1/completions", json=body) as stream,
    ):
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                answer = answer or ask()
    assert text == alone
    assert answer is not None
    return answer


@pytest.mark.slow
def test_files_that_are_written_while_they_are_read(url: str, root: Path, alone: str) -> None:
    """What is loaded is one of the two that were whole. Each other load names why not."""
    whole = {}
    for seed, name in ((5, "five"), (6, "six")):
        directory = strong_adapter(root.parent / name, seed, NUM_LAYERS)
        whole[read_adapter(directory, MAX_BYTES).digest] = (directory / WEIGHTS).read_bytes()
    strong_adapter(root / "written", 5, NUM_LAYERS)
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            for content in whole.values():
                (root / "written" / WEIGHTS).write_bytes(content)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(NUM_RACES):
            body = {"lora_name": "written", "lora_path": "written", "load_inplace": True}
            answer = beside_a_stream(url, alone, lambda body=body: call(url, LOAD_PATH, **body))  # type: ignore[misc]
            if answer.status_code == 200:
                assert answer.json()["digest"] in whole
            else:
                assert answer.status_code == 400
                assert any(
                    why in answer.json()["error"]["message"] for why in ("changed while", "other files", WEIGHTS)
                )
    finally:
        is_over.set()
        writer.join()
    assert call(url, LOAD_PATH, lora_name="written", lora_path="written", load_inplace=True).status_code == 200
    assert call(url, UNLOAD_PATH, lora_name="written").status_code == 200
