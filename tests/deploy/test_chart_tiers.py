"""Values of the tiers in host memory and on disk: what nodes would refuse at their start the chart refuses before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import helm_python
import pytest

from tests.deploy.chart import one, render

if TYPE_CHECKING:
    from tests.deploy.chart import Object

CACHE = {
    "extraVolumes": [{"name": "cache", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "cache", "mountPath": "/cache/"}],
}
DISK = {"host-cache-gb": 64, "disk-cache-dir": "/cache/$(POD_NAME)", "disk-cache-gb": 1000}


def role(args: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {"roles": {"prefill": {"args": args, **values}}}


def pair(decode: dict[str, Any]) -> dict[str, Any]:
    nodes = {"kind": "pair", "args": DISK, "pair": {"decode": {"args": decode}}, **CACHE}
    return {"roles": {"prefill": None, "decode": None, "host": nodes}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (role({"host-cache-gb": "64GB"}), "host-cache-gb: 64GB is no size; write a number of GB, 0 or more"),
    (role({"host-cache-gb": -1}), "host-cache-gb: -1 is no size"),
    (role({"host-cache-gb": True}), "host-cache-gb: true is no size"),
    (role({"host-cache-gb": "nan"}), "host-cache-gb: nan is no size"),
    (role({"host-cache-gb": 4, "swap-gb": "16Gi"}), "swap-gb: 16Gi is no size"),
    (role(DISK | {"disk-cache-gb": "1T"}, **CACHE), "disk-cache-gb: 1T is no size"),
    (role({"host-cache-gb": 4, "prefix-caching": False}), "host-cache-gb: it keeps prefixes, of which prefix-caching"),
    (role({"disk-cache-gb": 500}), "disk-cache-gb: without disk-cache-dir there are no files"),
    (role({"disk-cache-dir": "/cache/a"}, **CACHE), "disk-cache-dir: its blocks go through host memory; set host-cach"),
    (role({"disk-cache-dir": "/cache/a", "host-cache-gb": "0"}, **CACHE), "set host-cache-gb too"),
    (role(DISK, gpus={"count": 2}, **CACHE), "disk-cache-dir: it serves nodes of one rank, and this one has 2"),
    (role(DISK | {"tp": 4}, **CACHE), "it serves nodes of one rank, and this one has 4"),
    (role(DISK), "disk-cache-dir: /cache/$(POD_NAME) is in no volume that the node can write; mount one there"),
    (role(DISK, extraVolumes=CACHE["extraVolumes"],
          extraVolumeMounts=[{"name": "cache", "mountPath": "/cache", "readOnly": True}]), "is in no volume that"),
    (role(DISK, extraVolumes=CACHE["extraVolumes"],
          extraVolumeMounts=[{"name": "cache", "mountPath": "/ca"}]), "is in no volume that"),
    (pair({}), "disk-cache-dir: both nodes of the pair have /cache/$(POD_NAME), and a directory is one node's"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "sentence"), REFUSED, ids=[f"{i} {row[1][:40]}" for i, row in enumerate(REFUSED)])
def test_pods_that_could_not_start_are_refused_with_a_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert sentence in str(refused.value)


def limits_of(objects: list[Object], name: str) -> list[str]:
    spec = one(objects, "StatefulSet", name)["spec"]["template"]["spec"]
    return [container["resources"]["limits"]["memory"] for container in spec["containers"]]


@pytest.mark.parametrize(
    ("args", "gb"),
    [
        ({"host-cache-gb": 64}, 64),
        ({"host-cache-gb": "64"}, 64),
        ({"host-cache-gb": "1.5e1"}, 15),
        ({"host-cache-gb": 4, "swap-gb": 64}, 64),
        ({"host-cache-gb": 64, "swap-gb": "4", "tp": 2}, 128),
        ({"host-cache-gb": 0, "swap-gb": 64}, 0),  # as before there were tiers: it is the user's to count
    ],
)
def test_a_pods_memory_covers_what_its_ranks_pin(args: dict[str, Any], gb: int) -> None:
    limits = {"requests": {"memory": "8000000000"}, "limits": {"memory": "16000000000"}}
    assert limits_of(render(role(args, resources=limits)), "-prefill") == [str((16 + gb) * 10**9)]


def test_a_disk_for_each_node_of_a_pair_renders() -> None:
    objects = render(pair({"disk-cache-dir": "/cache/$(POD_NAME)-decode"}))
    found = [flag for part in one(objects, "StatefulSet", "-host")["spec"]["template"]["spec"]["containers"]
             for flag in part["args"] if "disk-cache-dir" in flag]  # fmt: skip
    assert found == ["--disk-cache-dir=/cache/$(POD_NAME)", "--disk-cache-dir=/cache/$(POD_NAME)-decode"]


def test_a_container_that_can_write_its_root_needs_no_volume() -> None:
    assert render(role(DISK) | {"containerSecurityContext": {"readOnlyRootFilesystem": False}})
    assert render(role(DISK | {"disk-cache-dir": "/tmp/cache"})), "the pod's own volume"
