"""Adapters between nodes of one and of two ranks: each prefills for the other, in both orders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import Launcher
from tests.integration.strong_adapters import strong_adapter
from tests.integration.system import ask_url
from tests.integration.test_unequal import metric, paired
from tests.shallow_model import NUM_LAYERS, shallow_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster import Launched

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
NAMES = ("one", "two", "base")
BODY: dict[str, Any] = {
    "prompt": [(7 * i) % 3000 + 5 for i in range(160)], "max_tokens": 12, "temperature": 0, "ignore_eos": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Launcher, dict[str, Launched]]]:
    root = tmp_path_factory.mktemp("adapters")
    own = [f"{name}={strong_adapter(root / name, seed, NUM_LAYERS)}" for seed, name in enumerate(NAMES[:2], 1)]
    flags = (f"--model={shallow_model()}", "--served-model-name=base", "--kv-cache-gb=0.05", "--lora-slots=2",
             "--max-lora-rank=8", "--lora", *own)  # fmt: skip
    with Launcher() as launcher:
        found = {
            f"tp{tp}": launcher.node("mixed", f"--node-id=tp{tp}", f"--tp={tp}", *flags, wait=False) for tp in (1, 2)
        }
        for node in found.values():
            node.wait_line("ready: ")
        yield launcher, found


def texts(url: str, salt: str, route: str = "") -> list[str]:
    asked = [("/v1/completions", BODY | {"model": name, "cache_salt": salt}) for name in NAMES]
    return [answer.choices[0]["text"] for answer in ask_url(url, asked, route)]


@pytest.mark.parametrize(("prefill", "decode"), [("tp2", "tp1"), ("tp1", "tp2")])
def test_unequal_nodes_answer_alike(nodes: tuple[Launcher, dict[str, Launched]], prefill: str, decode: str) -> None:
    launcher, by_name = nodes
    alone = [texts(node.url, f"alone {prefill}") for node in by_name.values()]
    assert alone[0] == alone[1]
    assert len(set(alone[0])) == len(NAMES), "each adapter answers in its own way"
    router = launcher.router(prefill=[by_name[prefill]], decode=[by_name[decode]])
    with paired(router, prefill, decode):
        for route in ("p-first", "d-first"):
            before = metric(by_name[decode], "pd_kv_transfer_bytes_total")
            assert texts(router.url, f"{route} {prefill}", route) == alone[0]
            assert metric(by_name[decode], "pd_kv_transfer_bytes_total") > before, "the prompt was handed over"
    router.stop()
