"""The cluster's file: what it becomes, and what is refused in which words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_cluster.errors import StartupError
from pd_cluster.launch.cli import build_parser
from pd_cluster.launch.flags import config_from
from pd_cluster.launch.on_ray.spec import NODE_ROLES, ClusterSpec, RoleSpec, read_spec
from tests.cluster import ROOT

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLE = ROOT / "deploy" / "ray" / "cluster.yaml"


def written(directory: Path, text: str) -> ClusterSpec:
    file = directory / "cluster.yaml"
    file.write_text(text)
    return read_spec(file)


def test_the_example_is_a_cluster_of_two_and_two() -> None:
    spec = read_spec(EXAMPLE)
    assert spec.counts == {"prefill": 2, "decode": 2, "mixed": 0, "router": 1}
    assert spec.host == "127.0.0.1"  # no address: a Ray for this machine alone
    assert spec.router_port == 8000


@pytest.mark.parametrize("role", NODE_ROLES)
def test_arguments_are_those_of_the_command_line(role: str) -> None:
    arguments = read_spec(EXAMPLE).arguments(role)
    config = config_from(build_parser().parse_args([role, *arguments]), environ={})
    assert config.cache.kv_cache_gb == 0.25
    assert config.model.num_threads == 1
    assert config.server.drain_s == 30


def test_flags_of_a_role_win_over_those_of_all(tmp_path: Path) -> None:
    spec = written(
        tmp_path,
        """
        address: 10.0.0.1:6379
        flags: {prefix-caching: true, max-num-seqs: 8, lease-ttl-s: 3}
        decode: {count: 1, cpus: 4, flags: {prefix-caching: false, num-threads: 2}}
        """,
    )
    assert set(spec.arguments("decode")) == {
        "--no-prefix-caching", "--max-num-seqs=8", "--lease-ttl-s=3.0", "--num-threads=2", "--drain-s=30.0",
        "--start-deadline-s=600.0",
    }  # fmt: skip
    assert {"--prefix-caching", "--num-threads=1"} <= set(spec.arguments("prefill"))
    assert spec.host == ""


def test_nodes_that_share_a_gpu_share_its_memory() -> None:
    spec = ClusterSpec(decode=RoleSpec(count=2, gpus=0.5), flags={"gpu-memory-utilization": 0.8})
    assert "--gpu-memory-utilization=0.8" in spec.arguments("decode")  # said is said
    spec = ClusterSpec(decode=RoleSpec(count=2, gpus=0.5))
    assert "--gpu-share=0.5" in spec.arguments("decode")
    assert not [flag for flag in spec.arguments("decode") if flag.startswith("--num-threads")]


def test_ranks_follow_from_the_gpus() -> None:
    spec = ClusterSpec(decode=RoleSpec(count=1, gpus=2), prefill=RoleSpec(count=1, gpus=1), mixed=RoleSpec(cpus=6))
    assert "--tp=2" in spec.arguments("decode")
    assert not any(flag.startswith("--tp") for role in ("prefill", "mixed") for flag in spec.arguments(role))
    on_cpus = ClusterSpec(mixed=RoleSpec(count=1, cpus=6), flags={"tp": 2})
    assert {"--tp=2", "--num-threads=3"} <= set(on_cpus.arguments("mixed"))


def test_a_role_without_needs_still_has_a_bundle() -> None:
    assert RoleSpec(cpus=0).bundle == {"CPU": 0.001}
    assert RoleSpec(cpus=2, gpus=1, resources={"edge": 1}).bundle == {"CPU": 2, "GPU": 1, "edge": 1}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("decode: {count: 1, replicas: 2}", "unknown field `replicas` - at `$.decode`"),
        ("decode: {count: -1}", "Expected `int` >= 0 - at `$.decode.count`"),
        ("decode: {count: two}", "Expected `int`, got `str` - at `$.decode.count`"),
        ("prefill: {count: 2}", "decode or mixed must be at least 1"),
        ("{decode: {count: 1}, router: {count: 0}}", "there is no router"),
        ("{decode: {count: 1}, name: Upper}", "at `$.name`"),
        ("{decode: {count: 1}, placement: near}", "'near' - at `$.placement`"),
        ("{decode: {count: 1}, grace_s: 0}", "at `$.grace_s`"),
        ("{decode: {count: 1, gpus: 1.5}}", "gpus must be a share of one GPU or a whole number"),
        ("{decode: {count: 1, gpus: 2, flags: {tp: 4}}}", "decode: tp is 4, but gpus is 2; a rank has one GPU"),
        ("{decode: {count: 1, gpus: 0.5, flags: {tp: 2}}}", "decode: tp is 2, but gpus is 0.5"),
        ("{decode: {count: 1, flags: {tp: 0}}}", "--tp must be at least 1, not 0"),
        ("{decode: {count: 1, resources: {GPU: 1}}}", "decode: write CPU and GPU as cpus and gpus"),
        ("{decode: {count: 1}, flags: {max-seqs: 3}}", "'max-seqs' is unknown or cannot be set here"),
        ("{decode: {count: 1}, flags: {max-tokens-beside-decodes: 64}}", "was removed: a node's --slo-itl-ms"),
        ("{decode: {count: 1}, balance: true, flags: {slo-ttft-ms: 200}}", "set slo-ttft-ms and slo-tpot-ms in flags"),
        ("{decode: {count: 1}, flags: {port: 3}}", "'port' is unknown or cannot be set here"),
        ("{decode: {count: 1}, flags: {cluster-key-file: k}}", "'cluster-key-file' is unknown"),
        ("{decode: {count: 1}, flags: {max-num-seqs: many}}", "max-num-seqs: Expected `int`, got `str`"),
        ("{decode: {count: 1}, flags: {dtype: int4}}", "dtype: must be one of auto, float32"),
        ("{decode: {count: 1}, flags: {max-num-seqs: -1}}", "--max-num-seqs must be at least 0"),
        ("{decode: {count: 1}, router: {count: 1, flags: {decode: x}}}", "flags of router: 'decode' is unknown"),
        ("{decode: {count: 1}, router: {count: 1, flags: {route: p}}}", "route: must be one of p-first, d-first"),
        ("{decode: {count: 1}, router: {count: 1, flags: {eject-after: 0}}}", "--eject-after must be at least 1"),
        ("decode: [", "is not YAML"),
        ("just a word", "Expected `object`, got `str`"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(StartupError) as caught:
        written(tmp_path, text)
    assert complaint in str(caught.value)
    assert "cluster.yaml" in str(caught.value)


@pytest.mark.parametrize("role", ["decode", "router"])
def test_each_wrong_flag_is_told_with_its_place(role: str, tmp_path: Path) -> None:
    flags = "{tp: 0, max-num-seqs: -1, max-waiting: -2}" if role == "decode" else "{workers: 0, eject-after: 0}"
    with pytest.raises(StartupError) as caught:
        written(tmp_path, f"decode: {{count: 1}}\n{role}: {{count: 1, flags: {flags}}}\n")
    lines = str(caught.value).splitlines()
    assert len(lines) == flags.count(":")
    for line in lines:
        assert line.startswith(f"{tmp_path / 'cluster.yaml'}: flags of {role}: --")


def test_wrong_flags_of_all_roles_are_told_once_each(tmp_path: Path) -> None:
    """One that all nodes share names the roles that have it, which are those without a flag of their own."""
    text = """
        flags: {max-num-seqs: -1, max-seqs: 3}
        prefill: {count: 1, flags: {dtype: int4}}
        decode: {count: 1, gpus: 2, flags: {max-num-seqs: 4, max-waiting: -2, tp: 0}}
        mixed: {count: 0, gpus: 1.5, flags: {max-waiting: -2, tp: 3}}
        router: {count: 1, resources: {CPU: 1}, flags: {decode: x, workers: many, eject-after: 0}}
        """
    with pytest.raises(StartupError) as caught:
        written(tmp_path, text)
    place = f"{tmp_path / 'cluster.yaml'}: "
    assert [line.removeprefix(place).split(" must ")[0] for line in str(caught.value).splitlines()] == [
        "mixed: gpus",
        "router: write CPU and GPU as cpus and gpus, not under resources",
        "flags of prefill, decode, mixed: 'max-seqs' is unknown or cannot be set here",
        "flags of prefill: dtype:",
        "flags of prefill, mixed: --max-num-seqs",
        "flags of decode: --tp",
        "flags of decode, mixed: --max-waiting",
        "flags of mixed: tp is 3, but gpus is 1.5; a rank has one GPU, so leave tp out",
        "flags of router: 'decode' is unknown or cannot be set here",
        "flags of router: workers: Expected `int`, got `str`",
        "flags of router: --eject-after",
    ]


def test_missing_roles_are_told_beside_wrong_flags(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught:
        written(tmp_path, "prefill: {count: 2}\nrouter: {count: 0, flags: {workers: 0}}\n")
    lines = str(caught.value).splitlines()
    told = ("no node can decode", "there is no router", "flags of router: --workers must be")
    assert all(part in line for line, part in zip(lines, told, strict=True)), lines


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read .*none\.yaml"):
        read_spec(tmp_path / "none.yaml")
