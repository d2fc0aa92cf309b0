"""How `pd-cluster up` deals a machine's GPUs or cores to its nodes, and which degrees it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig
from pd_cluster.errors import StartupError
from pd_cluster.launch import preflight
from pd_cluster.launch.cli import build_parser
from pd_cluster.launch.flags import config_from, given_flags
from pd_cluster.launch.model_path import DEMO_MODEL
from pd_cluster.launch.node_plan import RolePlan, plan_nodes, role_plans, role_problems, visible_gpus

if TYPE_CHECKING:
    from pathlib import Path

ROLES = {"prefill": RolePlan(2), "decode": RolePlan(1)}


def test_cores_are_divided() -> None:
    plans = plan_nodes(ROLES, ["--block-size=32"], [], 8)
    assert [(plan.name, plan.role, plan.devices) for plan in plans] == [
        ("prefill-0", "prefill", None),
        ("prefill-1", "prefill", None),
        ("decode-0", "decode", None),
    ]
    assert plans[0].flags == ("--block-size=32", "--tp=1", "--num-threads=2", "--drain-s=5", "--node-id=prefill-0")


def test_there_is_always_one_thread() -> None:
    assert "--num-threads=1" in plan_nodes(ROLES, [], [], 2)[0].flags


def test_what_the_user_gave_stays() -> None:
    flags = ["--num-threads=7", "--drain-s=1"]
    assert plan_nodes(ROLES, flags, [], 8)[0].flags == (*flags, "--tp=1", "--node-id=prefill-0")


def test_gpus_are_dealt_and_shared() -> None:
    plans = plan_nodes(ROLES, ["--drain-s=1"], ["GPU-a", "GPU-b"], 8)
    assert [plan.devices for plan in plans] == ["GPU-a", "GPU-b", "GPU-a"]
    assert all("--gpu-share=0.5" in plan.flags for plan in plans), "a request fits all nodes or none"
    alone = plan_nodes({**ROLES, "prefill": RolePlan(1)}, [], ["GPU-a", "GPU-b"], 8)
    assert not any("gpu-share" in flag for plan in alone for flag in plan.flags)
    given = plan_nodes(ROLES, ["--gpu-share=0.3"], ["GPU-a"], 8)
    assert [[flag for flag in plan.flags if "gpu" in flag] for plan in given] == [["--gpu-share=0.3"]] * 3


def both(tp: int, num_prefill: int = 1) -> dict[str, RolePlan]:
    return {"prefill": RolePlan(num_prefill, tp), "decode": RolePlan(1, tp)}


def test_a_node_gets_a_gpu_for_each_rank() -> None:
    gpus = ["0", "1", "2", "3"]
    alone = plan_nodes(both(2), [], gpus, 8)
    assert [plan.devices for plan in alone] == ["0,1", "2,3"]
    assert not any("gpu-share" in flag for plan in alone for flag in plan.flags)
    shared = plan_nodes(both(2, 2), [], [*gpus, "4"], 8)
    assert [plan.devices for plan in shared] == ["0,1", "2,3", "0,1"], "a GPU that fills no run stays idle"
    assert all("--gpu-share=0.5" in plan.flags for plan in shared)
    with pytest.raises(StartupError, match="--tp 4: a prefill node needs 4 GPUs, and this machine shows 2"):
        plan_nodes(both(4), [], ["0", "1"], 8)


def test_cores_are_divided_over_ranks() -> None:
    assert "--num-threads=2" in plan_nodes(both(2, 2), [], [], 12)[0].flags
    assert "--num-threads=1" in plan_nodes(both(2, 2), [], [], 4)[0].flags
    assert "--num-threads=4" in plan_nodes({"prefill": RolePlan(1), "decode": RolePlan(1, 2)}, [], [], 12)[0].flags


def test_roles_of_unequal_degree() -> None:
    plans = plan_nodes({"prefill": RolePlan(2, 1), "decode": RolePlan(1, 2)}, [], ["0", "1", "2", "3"], 8)
    assert [plan.devices for plan in plans] == ["0", "1", "2,3"]
    assert [plan.flags[0] for plan in plans] == ["--tp=1", "--tp=1", "--tp=2"]
    assert not any("gpu-share" in flag for plan in plans for flag in plan.flags)
    shared = plan_nodes({"prefill": RolePlan(2, 1), "decode": RolePlan(1, 2)}, [], ["0", "1"], 8)
    assert [plan.devices for plan in shared] == ["0", "1", "0,1"]
    assert all("--gpu-share=0.5" in plan.flags for plan in shared)
    with pytest.raises(StartupError, match="--tp 3: a decode node needs 3 GPUs, and this machine shows 2"):
        plan_nodes({"prefill": RolePlan(1), "decode": RolePlan(1, 3)}, [], ["0", "1"], 8)


role_plan = st.builds(RolePlan, count=st.integers(1, 4), tp=st.integers(1, 4))


@pytest.mark.long
@given(st.dictionaries(st.sampled_from(["prefill", "decode", "mixed"]), role_plan, min_size=1), st.integers(4, 16))
def test_no_gpu_has_more_nodes_than_shares(roles: dict[str, RolePlan], num_gpus: int) -> None:
    plans = plan_nodes(roles, [], [str(gpu) for gpu in range(num_gpus)], 8)
    held = [(plan.devices or "").split(",") for plan in plans]
    assert [len(set(gpus)) for gpus in held] == [roles[plan.role].tp for plan in plans]
    most = max(sum(str(gpu) in gpus for gpus in held) for gpu in range(num_gpus))
    shares = {flag for plan in plans for flag in plan.flags if "gpu-share" in flag}
    assert shares == ({f"--gpu-share={1 / most:.3g}"} if most > 1 else set())
    if sum(plan.count * plan.tp for plan in roles.values()) <= num_gpus:
        assert most == 1, "there are GPUs enough, and some are shared"


def plans_of(*flags: str, default_tp: int = 1) -> dict[str, RolePlan]:
    return role_plans(build_parser().parse_args(["up", *flags]), default_tp)


def test_a_role_has_its_own_degree_or_that_of_all() -> None:
    assert plans_of("--mixed=1", "--decode-tp=4", default_tp=2) == {
        "prefill": RolePlan(1, 2), "decode": RolePlan(1, 4), "mixed": RolePlan(1, 2)
    }  # fmt: skip
    assert plans_of("--prefill=0", "--decode=0", "--mixed=2") == {"mixed": RolePlan(2)}


def test_a_role_has_its_own_host_cache_or_that_of_all() -> None:
    roles = plans_of("--mixed=1", "--host-cache-gb=4", "--prefill-host-cache-gb=64.5")
    assert [roles[role].host_cache_gb for role in ("prefill", "decode", "mixed")] == [64.5, None, None]
    flags = {plan.role: plan.flags for plan in plan_nodes(roles, ["--host-cache-gb=4"], [], 8)}
    assert flags["prefill"][:3] == ("--host-cache-gb=4", "--tp=1", "--host-cache-gb=64.5"), "the last one holds"
    assert [flag for flag in flags["decode"] if "host-cache" in flag] == ["--host-cache-gb=4"]
    seen: list[tuple[int, float]] = []

    def problems(settings: NodeConfig) -> list[str]:
        seen.append((settings.model.tp, settings.cache.host_cache_gb))
        return ["too much"] if settings.cache.host_cache_gb > 5 else []

    config = NodeConfig(cache=CacheConfig(host_cache_gb=4))
    assert list(role_problems(roles, config, problems)) == ["prefill nodes: too much"]
    assert seen == [(1, 64.5), (1, 4)], "each kind of node is judged once"
    with pytest.raises(StartupError, match=r"--decode-host-cache-gb 2: there are no decode nodes \(--decode 0\)"):
        plans_of("--decode=0", "--mixed=1", "--decode-host-cache-gb=2")


def test_each_node_has_a_directory_of_its_own_on_the_disk() -> None:
    plans = plan_nodes(ROLES, ["--disk-cache-dir=/var/cache/pd", "--disk-cache-gb=9"], [], 8)
    assert [plan.flags[0] for plan in plans] == [f"--disk-cache-dir=/var/cache/pd/{plan.name}" for plan in plans]
    assert all(plan.flags[1] == "--disk-cache-gb=9" for plan in plans)


@pytest.mark.parametrize(
    ("flags", "with_disk"),
    [
        (("--prefill-host-cache-gb=8",), {"prefill"}),
        (("--mixed=1", "--host-cache-gb=8", "--prefill-host-cache-gb=0"), {"decode", "mixed"}),
        (("--host-cache-gb=8",), {"prefill", "decode"}),
        ((), {"prefill", "decode"}),  # each of them refuses it
    ],
)
def test_the_disk_is_for_roles_with_a_host_cache(flags: tuple[str, ...], with_disk: set[str]) -> None:
    disk = ["--disk-cache-dir=/d", "--disk-cache-gb=9"]
    namespace = build_parser().parse_args(["up", *flags, *disk])
    config, roles = config_from(namespace), role_plans(namespace, 1)
    plans = plan_nodes(roles, given_flags(namespace, skip=("tp",)), [], 8)
    assert {plan.role for plan in plans if f"--disk-cache-dir=/d/{plan.name}" in plan.flags} == with_disk
    assert {plan.role for plan in plans if any("disk" in flag for flag in plan.flags)} == with_disk
    assert {role for role, plan in roles.items() if plan.settings(config).cache.disk_cache_dir} == with_disk
    machine = preflight.MachineFacts()
    machine.free_host_bytes = lambda: 100 << 30  # type: ignore[method-assign]
    problems = list(role_problems(roles, config, lambda settings: preflight.machine_problems(settings, machine)))
    assert problems == ([] if flags else ["--disk-cache-dir needs --host-cache-gb, through which its blocks go"])


@pytest.mark.parametrize("degree", ["0", "-1", "two"])
def test_a_degree_below_one_is_refused(degree: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plans_of(f"--decode-tp={degree}")
    assert "--decode-tp" in capsys.readouterr().err


def test_a_degree_of_no_node_is_refused() -> None:
    with pytest.raises(StartupError, match=r"--prefill-tp 2: there are no prefill nodes \(--prefill 0\)"):
        plans_of("--prefill=0", "--prefill-tp=2")
    with pytest.raises(StartupError, match="no node can decode"):
        plans_of("--decode=0")


def test_a_degree_that_cannot_be_is_refused_with_its_role() -> None:
    config = NodeConfig(model=ModelConfig(tp=5))
    roles = {"prefill": RolePlan(1, 1), "decode": RolePlan(1, 3)}

    def problems(roles: dict[str, RolePlan]) -> list[str]:
        return list(role_problems(roles, config, lambda settings: preflight.model_problems(settings, DEMO_MODEL)))

    assert problems({"prefill": RolePlan(1, 1), "decode": RolePlan(1, 2)}) == [], "--tp 5 is the degree of no node"
    assert problems(roles)[0].startswith("decode nodes: --tp 3: "), problems(roles)
    assert problems({role: RolePlan(1, 3) for role in roles})[0].startswith("--tp 3: ")
    (found,) = role_problems({**roles, "decode": RolePlan(1, 65)}, config, preflight.setting_problems)
    assert found == "decode nodes: --tp must be at most 64, not 65"


@pytest.mark.parametrize(("chosen", "gpus"), [("", []), ("-1", []), ("3", ["3"]), ("GPU-x, 1", ["GPU-x", "1"])])
def test_the_environment_decides_which_gpus_there_are(chosen: str, gpus: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == gpus


def test_gpus_are_asked_for_by_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU-1\\nGPU-2\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert visible_gpus({}) == ["GPU-1", "GPU-2"]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert visible_gpus({}) == [], "a tool without a driver is no GPU"
