"""The only prefill pod of a cluster comes and goes, as KEDA's minReplicas 0 has it: nothing fails, decode nodes read
the prompts meanwhile, and the routers export all the time how many prompt tokens there are to compute."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.cluster import Launcher
from tests.deadlines import HANG_S
from tests.integration.fault_cluster import Member, fetch, parse_metrics, start, until
from tests.integration.test_role_change import FLAGS, Load, learn
from tests.router.fake_kubernetes import FakeKubernetes, kubernetes

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(300)]

WITHOUT_PREFILL = "direct; reason=no-prefill-node"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def put(api: FakeKubernetes, member: Member, role: str, *, terminating: bool = False) -> None:
    """The member's pod, as the API server tells it."""
    await api.put(member.name, role, port=urlsplit(member.url).port, terminating=terminating)


async def demand(url: str) -> float:
    """Prompt tokens that no cache had: what the trigger that wakes prefill is made of (`_scaling.tpl`)."""
    told = parse_metrics((await fetch(f"{url}/metrics")).text)
    prompt, cached = (
        sum(value for name, value in told.items() if name.startswith(f"pd_router_{figure}_tokens_total"))
        for figure in ("prompt", "cached")
    )
    return prompt - cached


async def test_prefill_comes_from_zero_and_goes_again_under_load(tmp_path: Path) -> None:
    with Launcher() as launcher:
        d0, p0 = Member(launcher, "d0", "decode", *FLAGS), Member(launcher, "p0", "prefill", *FLAGS)
        start([d0, p0])  # the second one has no pod yet
        async with kubernetes() as (api, _):
            await put(api, d0, "decode")
            config = tmp_path / "kubeconfig"
            config.write_text(json.dumps(kubeconfig(api.url)))
            router = launcher.command(
                "router", "--port=0", "--health-interval-s=0.2", f"--health-timeout-s={HANG_S:g}",
                f"--kubernetes-namespace={api.namespace}",
                "--kubernetes-selector=pd-cluster/part=node", environment={"KUBECONFIG": str(config)},
            )  # fmt: skip
            await asyncio.to_thread(router.wait_line, "router ready on ")
            url = router.url
            async with Load([url], [[outcome] for outcome in await learn(d0.url)]) as load:
                await load.until_new(lambda _, d: d == "d0", "d0 answers alone")
                assert set(load.reasons) == {WITHOUT_PREFILL}
                alone = await demand(url)
                assert alone > 0, "the trigger sees demand while no prefill pod is there"

                await put(api, p0, "prefill")
                await load.until_new(lambda p, _: p == "p0", "the first handoff")
                assert await d0.metric("pd_kv_transfer_bytes_total") > 0
                both = await demand(url)
                assert both > alone, "it still sees demand where prefill nodes read the prompts"

                await put(api, p0, "prefill", terminating=True)
                assert await asyncio.to_thread(p0.process.stop) == 0
                await api.delete("p0")
                begun = len(load.reasons)

                async def is_alone() -> bool:
                    return WITHOUT_PREFILL in load.reasons[begun:]

                await until(is_alone, "d0 answers alone again")
                assert "direct; reason=prefill-failed" not in load.reasons
                assert await demand(url) > both
            assert router.returncode is None
    assert any(reason.startswith("p-first") for reason in load.reasons)


def kubeconfig(server: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "users": [{"name": "test", "user": {}}],
    }
