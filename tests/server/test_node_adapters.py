"""Adapters of a node over a scripted engine: by the command line and by orders, to requests, lists and the feed."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import huggingface_hub
import msgspec
import pytest

from pd_cluster.adapters.adapter_directory import named_directories
from pd_cluster.config import LoraConfig
from pd_cluster.errors import BadAdapter, StartupError
from pd_cluster.protocol.orders import AdapterLoaded, LoadAdapter, UnloadAdapter
from pd_cluster.server.node import adapter_metrics, node_adapters
from pd_connectors.protocol import adapters
from pd_connectors.protocol.adapters import IN_HOST, ON_DEVICE, AdapterRecord
from pd_connectors.protocol.cache_space import cache_space
from pd_connectors.protocol.ticket import ORDER_HEADER, NodeOrder, sign
from pd_http.endpoints import LOAD_PATH, UNLOAD_PATH
from tests.deadlines import HANG_S
from tests.server.fake_engine import FakeEngine, Line, says
from tests.server.live_server import KEY, Node, running
from tests.server.test_feed import reading

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio
BODY = {"prompt": [5] * 40, "max_tokens": 1}
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["hi"]},
    "/tokenize": {"prompt": "hi"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
}


def written(directory: Path, text: str = "one") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_text(text)
    return directory


@asynccontextmanager
async def a_node(root: Path, *own: str) -> AsyncIterator[Node]:
    config = LoraConfig(lora=own, lora_dir=str(root), lora_slots=4)
    async with running(FakeEngine(says([7])), lora=config) as node:
        await node.state.adapters.load_own()
        yield node


def signed(step: str, record: AdapterRecord, action: str = "load_adapter", to: str = "node") -> dict[str, str]:
    order = NodeOrder(action, to, time.time() + 30.0, adapter=record, step=step)  # type: ignore[arg-type]
    return {ORDER_HEADER: sign(KEY, order)}


async def give(node: Node, step: str, record: AdapterRecord, **more: Any) -> tuple[int, Any]:
    path = UNLOAD_PATH if more.get("action") == "unload_adapter" else LOAD_PATH
    async with node.session.post(node.url + path, headers=signed(step, record, **more)) as answer:
        told = await answer.json()
        return answer.status, AdapterRecord(**told["adapter"]) if answer.status == 200 else told["error"]


async def ask(node: Node, model: str, path: str = "/v1/completions", **more: Any) -> tuple[int, Any]:
    async with node.session.post(node.url + path, json=DIALECTS[path] | {"model": model} | more) as answer:
        return answer.status, await answer.json()


async def listed(node: Node) -> dict[str, str | None]:
    async with node.session.get(node.url + "/v1/models") as answer:
        return {card["id"]: card["parent"] for card in (await answer.json())["data"]}


async def test_an_adapter_of_the_command_line_answers_by_its_name(tmp_path: Path) -> None:
    async with a_node(tmp_path, f"tuned={written(tmp_path / 'a')}") as node:
        status, answer = await ask(node, "tuned", cache_salt="mine")
        assert (status, answer["model"]) == (200, "tuned")
        (loaded,) = [one for one in node.engine.sent if isinstance(one, LoadAdapter)]
        (request,) = node.engine.requests
        assert request.adapter == loaded.digest
        assert request.salt == cache_space(loaded.digest, "mine")
        assert await listed(node) == {"demo": None, "tuned": "demo"}
        assert (await ask(node, "demo"))[1]["model"] == "demo"
        assert node.engine.requests[1].adapter == ""


async def test_an_unknown_name_is_404_in_every_dialect_and_409_for_a_router(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        for path in DIALECTS:
            assert (await ask(node, "absent", path))[0] == 404, path
        status, answer = await ask(node, "absent", kv_transfer_params={"do_remote_prefill": True})
        assert (status, answer["error"]["code"]) == (409, "adapter_absent")


async def test_files_are_those_that_a_link_led_to(tmp_path: Path) -> None:
    """They may be read again after the link leads to a newer version."""
    version = written(tmp_path / "v1")
    (tmp_path / "newest").symlink_to("v1")
    async with a_node(tmp_path) as node:
        assert (await give(node, "prepare", AdapterRecord("tuned", "newest", stamp=5)))[0] == 200
        assert [one.path for one in node.engine.sent if isinstance(one, LoadAdapter)] == [str(version)]


async def test_a_name_means_nothing_before_it_is_held_and_nothing_after_it_is_unloaded(tmp_path: Path) -> None:
    written(tmp_path / "a")
    async with a_node(tmp_path) as node:
        record = AdapterRecord("tuned", "a", stamp=5)
        status, found = await give(node, "prepare", record)
        assert (status, found.name, found.stamp) == (200, "tuned", 5)
        assert (await ask(node, "tuned"))[0] == 404
        assert await give(node, "hold", found) == (200, found)
        assert (await ask(node, "tuned"))[0] == 200
        assert await give(node, "hold", found) == (200, found), "a repeated order changes nothing"
        assert len([one for one in node.engine.sent if isinstance(one, LoadAdapter)]) == 1
        gone = AdapterRecord("tuned", stamp=6)
        assert await give(node, "hold", gone, action="unload_adapter") == (200, gone)
        assert node.engine.sent[-1] == UnloadAdapter(found.digest)
        assert (await ask(node, "tuned"))[0] == 404
        assert await give(node, "hold", found) == (200, gone), "an older order changes nothing"


@pytest.mark.parametrize("path", ["a", "b"])
@pytest.mark.parametrize(("gone", "kept"), [("one", "two"), ("two", "one")])
async def test_the_same_files_under_two_names_stay_until_both_are_unloaded(
    tmp_path: Path, path: str, gone: str, kept: str
) -> None:
    for name in ("a", "b"):
        written(tmp_path / name)
    async with a_node(tmp_path) as node:
        _, first = await give(node, "hold", AdapterRecord("one", "a", (await digest(node, tmp_path)), 5))
        _, second = await give(node, "hold", AdapterRecord("two", path, first.digest, 6))
        assert second.digest == first.digest
        await give(node, "hold", AdapterRecord(gone, stamp=7), action="unload_adapter")
        assert (await ask(node, gone))[0] == 404
        assert (await ask(node, kept))[0] == 200
        assert node.engine.requests[-1].adapter == first.digest
        assert not any(isinstance(one, UnloadAdapter) for one in node.engine.sent)
        await give(node, "hold", AdapterRecord(kept, stamp=8), action="unload_adapter")
        assert node.engine.sent[-1] == UnloadAdapter(first.digest)


async def digest(node: Node, root: Path, path: str = "a") -> str:
    """Of the files, by a prepare that is dropped."""
    record = AdapterRecord("for-its-digest", path, stamp=1)
    _, found = await give(node, "prepare", record)
    await give(node, "drop", record)
    node.engine.sent.clear()
    return str(found.digest)


async def test_a_second_order_for_a_name_waits_for_the_end_of_the_first(tmp_path: Path) -> None:
    written(tmp_path / "a")
    async with a_node(tmp_path) as node:
        first, second = (AdapterRecord("tuned", "a", stamp=stamp) for stamp in (5, 6))
        _, found = await give(node, "prepare", first)
        status, error = await give(node, "prepare", second)
        assert (status, error["code"]) == (409, "adapter_conflict")
        await give(node, "drop", first)
        assert node.engine.sent[-1] == UnloadAdapter(found.digest)
        assert (await give(node, "prepare", second))[0] == 200
        newer = AdapterRecord("tuned", stamp=9)
        await give(node, "hold", newer, action="unload_adapter")
        assert await give(node, "hold", AdapterRecord("tuned", "a", found.digest, 6)) == (200, newer)
        assert (await give(node, "prepare", second))[1]["code"] == "adapter_conflict"


async def test_a_later_order_takes_the_place_of_one_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its router has died between prepare and hold. If it only was slow, its hold is obeyed, by its stamp."""
    written(tmp_path / "a")
    written(tmp_path / "b", "two")
    monkeypatch.setattr(node_adapters, "YIELDS_S", 0.0)
    async with a_node(tmp_path) as node:
        _, first = await give(node, "prepare", AdapterRecord("tuned", "a", stamp=5))
        assert (await give(node, "prepare", AdapterRecord("tuned", "b", stamp=4)))[0] == 409, "it is older"
        status, second = await give(node, "prepare", AdapterRecord("tuned", "b", stamp=6))
        assert (status, UnloadAdapter(first.digest) in node.engine.sent) == (200, True)
        assert await give(node, "hold", first) == (200, first)
        assert await give(node, "hold", second) == (200, second)
        assert await give(node, "hold", first) == (200, second)
        loads = [one.path for one in node.engine.sent if isinstance(one, LoadAdapter)]
        assert loads.count(str(tmp_path / "b")) == 1, "it was prepared"


async def test_a_load_ends_with_its_engine(tmp_path: Path) -> None:
    written(tmp_path / "a")
    async with a_node(tmp_path) as node:
        node.engine.adapter_error = None
        loading = asyncio.create_task(give(node, "prepare", AdapterRecord("tuned", "a", stamp=5)))
        async with asyncio.timeout(HANG_S):
            while not any(isinstance(one, LoadAdapter) for one in node.engine.sent):  # noqa: ASYNC110
                await asyncio.sleep(0)
        node.engine.is_alive = False
        status, error = await asyncio.wait_for(loading, HANG_S)
        assert (status, error["code"]) == (503, "engine_died")
        assert not node.state.adapters._pending


async def test_a_prepare_of_a_dead_router_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a")
    monkeypatch.setattr(node_adapters, "PENDING_S", 0.0)
    async with a_node(tmp_path) as node:
        assert (await give(node, "prepare", AdapterRecord("tuned", "a", stamp=5)))[0] in (200, 409)
        async with asyncio.timeout(HANG_S):
            while not any(isinstance(one, UnloadAdapter) for one in node.engine.sent):  # noqa: ASYNC110
                await asyncio.sleep(0)
        monkeypatch.undo()
        assert (await give(node, "prepare", AdapterRecord("tuned", "a", stamp=6)))[0] == 200


async def test_an_unload_while_the_files_are_read_wins_by_its_stamp(tmp_path: Path) -> None:
    written(tmp_path / "a")
    async with a_node(tmp_path) as node:
        held = AdapterRecord("tuned", "a", await digest(node, tmp_path), 5)
        node.engine.adapter_error = None
        loading = asyncio.create_task(give(node, "hold", held))
        async with asyncio.timeout(HANG_S):
            while not any(isinstance(one, LoadAdapter) for one in node.engine.sent):  # noqa: ASYNC110
                await asyncio.sleep(0)
        gone = AdapterRecord("tuned", stamp=6)
        await give(node, "hold", gone, action="unload_adapter")
        (order,) = [one for one in node.engine.sent if isinstance(one, LoadAdapter)]
        node.engine.on_adapter(AdapterLoaded(held.digest, "", order.number))
        assert await loading == (200, gone)
        assert node.engine.sent[-1] == UnloadAdapter(held.digest)


@pytest.mark.long_cases
@pytest.mark.parametrize(
    ("record", "message"),
    [
        (AdapterRecord("demo", "a", stamp=5), "is the name of the model"),
        (AdapterRecord("a,b", "a", stamp=5), "no comma"),
        (AdapterRecord("x" * 257, "a", stamp=5), "256"),
        (AdapterRecord("tuned", "absent", stamp=5), "has no adapter_config.json"),
        (AdapterRecord("tuned", "../outside", stamp=5), "leads out"),
        (AdapterRecord("tuned", "/etc", stamp=5), "leads out"),
        (AdapterRecord("tuned", "../absent", stamp=5), "leads out"),  # as one that is there
        (AdapterRecord("tuned", "/absent", stamp=5), "leads out"),
        (AdapterRecord("tuned", "link", stamp=5), "leads out"),
        (AdapterRecord("tuned", "linked_file", stamp=5), "leads out"),
        (AdapterRecord("tuned", "a\0b", stamp=5), "null"),
        (AdapterRecord("tuned", "circle", stamp=5), "cannot read the adapter"),
        (AdapterRecord("tuned", "a" * 5000, stamp=5), "4096 characters"),
        (AdapterRecord("tuned", "a", "0" * 32, 5), "not 00000000"),
        (AdapterRecord("tuned", "a"), "no adapter with a stamp"),
    ],
)
async def test_what_cannot_be_loaded_is_named_and_changes_nothing(
    tmp_path: Path, record: AdapterRecord, message: str
) -> None:
    root = tmp_path / "root"
    for directory in (root / "a", root / "linked_file", tmp_path / "outside"):
        written(directory)
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "circle").symlink_to(root / "circle")
    (root / "linked_file" / "adapter_model.safetensors").unlink()
    (root / "linked_file" / "adapter_model.safetensors").symlink_to(tmp_path / "outside" / "adapter_model.safetensors")
    async with a_node(root) as node:
        for step in ("prepare", "hold") if record.digest or not record.stamp else ("prepare",):
            status, error = await give(node, step, record)
            assert status == 400
            assert message in error["message"]
        assert await listed(node) == {"demo": None}
        assert not any(isinstance(one, LoadAdapter) for one in node.engine.sent)


async def test_a_cancelled_load_leaves_nothing_and_its_answer_ends_no_other(tmp_path: Path) -> None:
    written(tmp_path / "a")
    async with a_node(tmp_path) as node:
        node.engine.adapter_error = None

        async def begun(stamp: int, num: int) -> tuple[asyncio.Task[AdapterRecord], LoadAdapter]:
            task = asyncio.create_task(node.state.adapters.prepare(AdapterRecord("tuned", "a", stamp=stamp)))
            async with asyncio.timeout(HANG_S):
                while len(loads := [one for one in node.engine.sent if isinstance(one, LoadAdapter)]) < num:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            return task, loads[-1]

        first, ordered = await begun(5, 1)
        first.cancel()
        assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], asyncio.CancelledError)
        assert node.engine.sent[-1] == UnloadAdapter(ordered.digest)
        second, again = await begun(6, 2)
        node.engine.on_adapter(AdapterLoaded(ordered.digest, "", ordered.number))
        node.engine.on_adapter(AdapterLoaded(again.digest, "no memory", again.number))
        with pytest.raises(BadAdapter, match="no memory"):
            await second
        assert node.engine.sent[-1] == UnloadAdapter(ordered.digest)


async def test_a_second_prepare_that_fails_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    record = AdapterRecord("tuned", "a", stamp=5)
    files = written(tmp_path / "a")
    async with a_node(tmp_path) as node:
        _, found = await give(node, "prepare", record)
        (files / "adapter_config.json").unlink()
        assert (await give(node, "prepare", record))[0] == 400
        assert node.engine.sent[-1] == UnloadAdapter(found.digest)


async def test_the_last_of_the_allowed_adapters_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_adapters, "MAX_RECORDS", 2)
    written(tmp_path / "a")
    async with a_node(tmp_path) as node:
        for stamp, name in enumerate(("one", "two"), 5):
            _, found = await give(node, "prepare", AdapterRecord(name, "a", stamp=stamp))
            assert await give(node, "hold", found) == (200, found)
        status, error = await give(node, "prepare", AdapterRecord("three", "a", stamp=9))
        assert (status, error["message"]) == (400, "this node has 2 adapters, the most allowed")
        assert (await give(node, "prepare", AdapterRecord("two", "a", stamp=10)))[0] == 200, "in place of the other"


async def test_orders_need_the_key_and_a_directory(tmp_path: Path) -> None:
    record = AdapterRecord("tuned", "a", stamp=5)
    async with a_node(tmp_path) as node:
        async with node.session.post(node.url + LOAD_PATH, json={"lora_name": "tuned", "lora_path": "a"}) as answer:
            assert answer.status == 401
        assert (await give(node, "hold", record, action="unload_adapter", to="other"))[0] == 400
        node.engine.adapter_error = "rank 1: the files have another digest"
        written(tmp_path / "a")
        status, error = await give(node, "prepare", record)
        assert (status, error["message"]) == (400, "rank 1: the files have another digest")
    for config in (LoraConfig(), LoraConfig(lora_slots=4)):
        async with running(FakeEngine(says([7])), lora=config) as node:
            assert (await give(node, "prepare", record))[1]["code"] == "bad_adapter"


@pytest.mark.long
async def test_the_feed_tells_what_each_name_means(tmp_path: Path) -> None:
    written(tmp_path / "a")
    async with a_node(tmp_path, f"own={written(tmp_path / 'b', 'two')}") as node, reading(node) as reader:
        assert reader.adapters.keys() == {"own"}
        _, found = await give(node, "prepare", AdapterRecord("tuned", "a", stamp=5))
        await give(node, "hold", found)
        while "tuned" not in reader.adapters:
            await reader.next()
        assert reader.adapters["tuned"].record == found
        stats = node.engine.stats
        assert stats is not None
        node.engine.stats = msgspec.structs.replace(stats, adapters={found.digest: IN_HOST})
        while reader.adapters["tuned"].tier != IN_HOST:
            await reader.next()


def test_a_start_names_what_is_wrong_with_its_adapters(tmp_path: Path) -> None:
    directory = written(tmp_path / "a")
    assert named_directories((f"one={directory}", f"two={directory}")) == dict.fromkeys(("one", "two"), directory)
    for given, message in (
        (("a",), "NAME=DIR"),
        (("=a",), "NAME=DIR"),
        ((f"one={directory}", f"one={directory}"), "given twice"),
        (("one=./absent",), "neither a directory nor a hub id"),
    ):
        with pytest.raises(StartupError, match=message):
            named_directories(given)


def test_a_full_disk_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only adapters of a hub are written."""

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(StartupError, match=r"owner/tuned.*No space left on device"):
        named_directories(("one=owner/tuned",))


async def test_metrics_name_adapters_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_metrics, "MAX_LABELS", 2)
    written(tmp_path / "a")
    async with a_node(tmp_path) as node:
        found = await digest(node, tmp_path)
        for number, name in enumerate(("one", "two", "three"), 5):
            await give(node, "hold", AdapterRecord(name, "a", found, number))
        release = asyncio.Event()

        async def waits(line: Line) -> None:
            await release.wait()
            await says([7])(line)

        node.engine.script = waits
        asked = asyncio.create_task(ask(node, "two"))
        async with asyncio.timeout(HANG_S):
            while not node.engine.requests:  # noqa: ASYNC110
                await asyncio.sleep(0)
        text = node.state.metrics.render("demo").decode()
        for prefix in ("pd_", "vllm:"):
            lines = [one for one in text.splitlines() if one.startswith(f"{prefix}lora_")]
            loaded = [one for one in lines if "lora_adapter_loaded" in one]
            assert len(loaded) == 2
            assert not any('lora_name="one"' in one for one in loaded), "the ones that were loaded last"
            (info,) = [one for one in lines if "lora_requests_info" in one]
            assert ('running_lora_adapters=""' in info, 'waiting_lora_adapters="two"' in info) == (True, True)
        stats = node.engine.stats
        assert stats is not None
        node.engine.stats = msgspec.structs.replace(stats, adapters={found: ON_DEVICE})
        text = node.state.metrics.render().decode()
        assert ('running_lora_adapters="two"' in text, 'waiting_lora_adapters=""' in text) == (True, True)
        release.set()
        assert (await asked)[0] == 200
        assert 'running_lora_adapters=""' in node.state.metrics.render().decode()
        assert not node.state.adapters._in_use, "names come and go without end"


async def test_what_was_told_of_forgotten_names_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_RECORDS", 2)
    written(tmp_path / "a")
    async with a_node(tmp_path) as node:
        found = await digest(node, tmp_path)
        for number in range(1, 12, 2):
            await give(node, "hold", AdapterRecord(f"name{number}", "a", found, number))
            node.state.adapters.changed_states()
            await give(node, "hold", AdapterRecord(f"name{number}", stamp=number + 1), action="unload_adapter")
            node.state.adapters.changed_states()
        assert len(node.state.adapters._told) == len(node.state.adapters.states()) == 2


async def test_a_request_that_found_the_adapter_before_a_replacement_is_served(tmp_path: Path) -> None:
    """It is on its way to the engine when the name gets another one: the engine has not been told to unload yet."""
    written(tmp_path / "a")
    written(tmp_path / "b", "two")
    async with a_node(tmp_path) as node:
        first, second = await digest(node, tmp_path), await digest(node, tmp_path, "b")
        await give(node, "hold", AdapterRecord("tuned", "a", first, 5))
        await give(node, "hold", AdapterRecord("tuned", "b", second, 6))
        assert UnloadAdapter(first) not in node.engine.sent
        assert node.state.adapters.digest_of("tuned") == second
