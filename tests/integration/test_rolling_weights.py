"""A rolling change of weights under load: two prefill and two decode nodes, each replaced by one of other weights.

Each answer is that of one of the two models, and no node ever gets a ticket of the other one.
"""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

from tests.cluster import Launcher
from tests.deadlines import HANG_S
from tests.integration.fault_cluster import Member, start, until
from tests.integration.test_role_change import FLAGS, KEY, Load, crossed, learn
from tests.patient_node import PATIENT
from tests.router.router_process import Router, serving
from tests.server.live_server import MODEL_DIR

if TYPE_CHECKING:
    from pathlib import Path

    from pd_router.nodes.node import Node

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(900)]
RESTART_S = 180.0
TENSOR = "model.layers.0.self_attn.v_proj.weight"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """The demo model with one tensor changed, under the same name."""
    copy = tmp_path / "demo_model"
    shutil.copytree(MODEL_DIR, copy)
    (file,) = (path for path in copy.glob("*.safetensors") if TENSOR in load_file(path))
    tensors = load_file(file)
    tensors[TENSOR] = -tensors[TENSOR]
    save_file(tensors, file, metadata={"format": "pt"})
    return copy


def node_of(router: Router, member: Member) -> Node:
    return next(node for node in router.services.table.nodes if node.url == member.url)


@pytest.mark.parametrize("order", ["p0 d0 p1 d1", "p0 p1 d0 d1"])
async def test_weights_roll_under_load(other_model: Path, order: str) -> None:
    with Launcher() as launcher:
        ps = [Member(launcher, f"p{i}", "prefill", *FLAGS, environment=PATIENT) for i in range(2)]
        ds = [Member(launcher, f"d{i}", "decode", *FLAGS, environment=PATIENT) for i in range(2)]
        new = Member(launcher, "new", "decode", *FLAGS, f"--model={other_model}", environment=PATIENT)
        start([*ps, *ds, new])
        expected = [list(pair) for pair in zip(await learn(ds[0].url), await learn(new.url), strict=True)]
        new.process.stop()
        assert all(one.text != other.text for one, other in expected), "the models must differ for every body"
        settings: dict[str, Any] = {
            "key": KEY, "health_interval_s": 0.2, "health_timeout_s": HANG_S, "continue_wait_s": HANG_S
        }  # fmt: skip
        num_crossed = 0.0
        async with serving(ps, ds, **settings) as router, Load([router.url], expected) as load:
            await load.until_new(lambda p, d: p[0] == "p" and d[0] == "d", "a pair")
            old = node_of(router, ps[0]).kv_version
            for member in ({one.name: one for one in (*ps, *ds)}[name] for name in order.split()):
                node = node_of(router, member)
                num_crossed += await crossed(member)
                await asyncio.to_thread(member.process.stop)
                member.begin(f"--model={other_model}")
                await asyncio.to_thread(member.wait_ready)

                async def is_known(node: Node = node) -> bool:
                    return node.reachable and node.kv_version not in ("", old)

                await until(is_known, f"the router knows the new {member.name}", RESTART_S)
                await load.until_new(lambda p, d: True, "answers go on")
            await load.until_new(lambda p, d: p[0] == "p", "a pair of the new model")
        if order.startswith("p0 p1"):
            assert "direct; reason=no-pair" in load.reasons, "at a time no prefill node paired"
        assert {node.kv_version for node in router.services.table.nodes} == {node.kv_version}
        num_crossed += sum([await crossed(member) for member in (*ps, *ds)])
        assert num_crossed == 0
