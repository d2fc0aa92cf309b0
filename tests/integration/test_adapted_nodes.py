"""Adapters through P and D of real processes: by name, by order of a client, and by route the same answers."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import httpx
import pytest

from pd_cluster.launch.node_commands import OrderRefused, RouterOrders
from pd_connectors.protocol.adapters import AdapterRecord
from pd_connectors.protocol.keys import derive_key
from tests.cluster import TEST_KEY
from tests.integration.strong_adapters import strong_adapter
from tests.integration.system import Path as Way
from tests.integration.system import System, running_system, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
BODY = {"prompt": [(7 * i) % 3000 + 5 for i in range(90)], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("own", "a", "b"), 1):
        strong_adapter(found / name, seed)
    return found


@pytest.fixture(scope="module")
def system(root: Path) -> Iterator[System]:
    flags = (f"--lora=own={root / 'own'}", f"--lora-dir={root}", "--lora-slots=2", "--max-lora-rank=8")
    with running_system(*flags, own_mixed=True) as system:
        yield system


def answer(system: System, way: Way, model: str) -> tuple[str, str]:
    """The text, and the model that the answer names."""
    body = system.ask(way, "/v1/completions", BODY | {"model": model}).body
    return body["choices"][0]["text"], body["model"]


def test_an_adapter_of_the_command_line_answers_alike_on_every_way(system: System) -> None:
    base, _ = answer(system, Way.MIXED, "demo_model")
    alone = answer(system, Way.MIXED, "own")
    assert alone == (alone[0], "own")
    assert alone[0] != base, "the adapter does something"
    for way in (Way.P_FIRST, Way.D_FIRST):
        assert answer(system, way, "own") == alone
        assert answer(system, way, "demo_model")[0] == base, "no KV of the adapter is the base's"
    assert not any("prompt_mismatch" in name and value for name, value in system.settled_metrics("decode").items())


def test_orders_load_replace_and_unload_on_all_nodes(system: System, root: Path) -> None:
    own, _ = answer(system, Way.P_FIRST, "own")
    with httpx.Client(base_url=system.router_url, timeout=600.0, trust_env=False) as client:
        orders = RouterOrders(client, derive_key(TEST_KEY))
        told = orders.about_adapter("load_adapter", AdapterRecord("tuned", "a"))
        assert set(told["nodes"].values()) == {told["digest"]}
        first = [answer(system, way, "tuned")[0] for way in (Way.P_FIRST, Way.D_FIRST)]
        assert first[0] == first[1] != own
        with pytest.raises(OrderRefused, match="load_inplace"):
            orders.about_adapter("load_adapter", AdapterRecord("tuned", "b"))
        other = orders.about_adapter("load_adapter", AdapterRecord("tuned", "b"), in_place=True)
        assert other["digest"] != told["digest"]
        second = [answer(system, way, "tuned")[0] for way in (Way.P_FIRST, Way.D_FIRST)]
        assert second[0] == second[1] not in (own, first[0]), "no KV of the one before is used"
        shutil.copytree(root / "own", root / "copy")
        orders.about_adapter("load_adapter", AdapterRecord("copied", "copy"))
        assert answer(system, Way.P_FIRST, "copied")[0] == own
        config = json.loads((strong_adapter(root / "wide", 9) / "adapter_config.json").read_text())
        (root / "wide" / "adapter_config.json").write_text(json.dumps(config | {"r": 64}))
        with pytest.raises(OrderRefused, match=r"400: .*rank"):
            orders.about_adapter("load_adapter", AdapterRecord("wide", "wide"))
        orders.about_adapter("unload_adapter", AdapterRecord("tuned"))
        orders.about_adapter("unload_adapter", AdapterRecord("copied"))
        assert client.post("/v1/completions", json=BODY | {"model": "tuned"}).status_code == 404
        assert answer(system, Way.P_FIRST, "own")[0] == own
        wait_until(lambda: not _loaded(client), lambda: str(_loaded(client)))


def _loaded(client: httpx.Client) -> list[str]:
    names = [card["id"] for card in client.get("/v1/models").json()["data"]]
    return [name for name in names if name not in ("demo_model", "own")]
