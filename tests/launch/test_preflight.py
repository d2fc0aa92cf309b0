"""What flags, configs and environment decide is told at once, with status 2, before any process is started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.shapes import CONFIGS
from pd_cluster.config import CacheConfig, HandoffConfig, ModelConfig, NodeConfig, ServerConfig
from pd_cluster.launch.cli import main
from pd_cluster.launch.model_path import DEMO_MODEL
from pd_cluster.launch.preflight import (
    MachineFacts,
    key_problems,
    machine_problems,
    model_problems,
    setting_problems,
    shared_memory_problems,
)
from tests.cluster import READY_DEADLINE_S, ROOT, SOURCES

if TYPE_CHECKING:
    from pathlib import Path

GARBAGE = bytes(range(128, 256))


class KnownMachine(MachineFacts):
    """Has all modules but `missing`, no usable CUDA device when `cuda` says why, and `gpus` that a rank may use."""

    def __init__(self, *missing: str, cuda: str = "", gpus: int = 0, free_gb: float = 100) -> None:
        self._missing = missing
        self._cuda = cuda
        self._gpus = gpus
        self._free_gb = free_gb

    def has_module(self, name: str) -> bool:
        return name not in self._missing

    def cuda_problem(self) -> str:
        return self._cuda

    def num_cuda_devices(self) -> int:
        return self._gpus

    def free_host_bytes(self) -> int:
        return int(self._free_gb * 1e9)


@pytest.mark.parametrize(
    ("tp", "cache", "problems"),
    [
        (1, CacheConfig(host_cache_gb=96), []),
        (1, CacheConfig(host_cache_gb=97), ["--host-cache-gb 97: "]),
        (2, CacheConfig(host_cache_gb=49), ["--host-cache-gb 49 for each of 2 ranks: "]),
        (1, CacheConfig(host_cache_gb=1, swap_gb=97), ["--swap-gb 97: "]),
        (1, CacheConfig(swap_gb=97), []),  # without a tier it is as before
    ],
)
def test_host_memory_that_the_machine_lacks_is_refused(tp: int, cache: CacheConfig, problems: list[str]) -> None:
    config = NodeConfig(model=ModelConfig(device="cpu", tp=tp), cache=cache)
    found = list(machine_problems(config, KnownMachine()))
    assert len(found) == len(problems)
    for line, begin in zip(found, problems, strict=True):
        assert line.startswith(begin + "this machine, or its control group, has 100.0 GB free")


@pytest.mark.parametrize(
    ("tp", "cache", "problem"),
    [
        (1, CacheConfig(host_cache_gb=8, prefix_caching=False), "--host-cache-gb keeps prefixes, of which --no-prefix"),
        (1, CacheConfig(swap_gb=8, prefix_caching=False), ""),
        (1, CacheConfig(disk_cache_gb=500), "--disk-cache-gb 500 needs --disk-cache-dir: "),
        (1, CacheConfig(disk_cache_gb=500, host_cache_gb=8), "--disk-cache-gb 500 needs --disk-cache-dir: "),
        (1, CacheConfig(disk_cache_dir="/d"), "--disk-cache-dir needs --host-cache-gb, "),
        (1, CacheConfig(disk_cache_dir="/d", swap_gb=8), "--disk-cache-dir needs --host-cache-gb, "),
        (1, CacheConfig(disk_cache_dir="/d", host_cache_gb=8, prefix_caching=False), "--host-cache-gb keeps prefixes"),
        (2, CacheConfig(disk_cache_dir="/d", host_cache_gb=8), "--disk-cache-dir serves nodes with --tp 1 only"),
        (1, CacheConfig(disk_cache_dir="/d", host_cache_gb=8, disk_cache_gb=500), ""),
    ],
)
def test_a_tier_that_nothing_would_use_is_refused_in_one_line(tp: int, cache: CacheConfig, problem: str) -> None:
    found = list(machine_problems(NodeConfig(model=ModelConfig(device="cpu", tp=tp), cache=cache), KnownMachine()))
    assert [line[: len(problem)] for line in found] == [problem] * bool(problem)


def test_the_nodes_of_a_machine_share_its_memory() -> None:
    nodes = [
        NodeConfig(cache=CacheConfig(host_cache_gb=40)),
        NodeConfig(model=ModelConfig(tp=2), cache=CacheConfig(host_cache_gb=20, swap_gb=28)),
        NodeConfig(cache=CacheConfig(swap_gb=90)),
    ]
    assert list(shared_memory_problems(nodes, KnownMachine())) == []
    [line] = shared_memory_problems([*nodes, NodeConfig(cache=CacheConfig(host_cache_gb=0.5))], KnownMachine())
    assert line.startswith("--host-cache-gb, of all nodes 96.5: this machine, or its control group, has 100.0 GB free")


def test_the_defaults_are_right() -> None:
    assert list(setting_problems(NodeConfig())) == []
    assert list(machine_problems(NodeConfig(), KnownMachine())) == []
    assert list(model_problems(NodeConfig(), DEMO_MODEL)) == []


NONSENSE: dict[type, tuple[float, ...]] = {
    int: (-(1 << 70), (1 << 64) + 1, 1 << 70, 10**400),  # the second is a multiple of nothing that others check
    float: (float("nan"), float("inf"), -0.1),
}


def numbers() -> list[tuple[str, str, float]]:
    config = NodeConfig()
    return [
        (section.name, item.name, value)
        for section in fields(config)
        for item in fields(getattr(config, section.name))
        for value in NONSENSE.get(type(getattr(getattr(config, section.name), item.name)), ())
    ]


@pytest.mark.long_cases
@pytest.mark.parametrize(("section", "name", "value"), numbers())
def test_no_number_setting_takes_nonsense(section: str, name: str, value: float) -> None:
    """Also those that are added later: their fields bound them, or a default does. Each is told once, by its bound."""
    config = NodeConfig()
    part = getattr(config, section)
    object.__setattr__(part, name, value)  # past its own checks, which refuse some of these
    flag = f"--{name.replace('_', '-')}"
    found = [
        *setting_problems(config),
        *machine_problems(config, KnownMachine(gpus=2)),
        *(model_problems(config, DEMO_MODEL) if section == "model" else ()),
    ]
    assert [problem.split()[0] for problem in found] == [flag]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (CacheConfig(block_size=17), "--block-size 17 is not a multiple of 16"),
        (CacheConfig(block_size=-16), "--block-size must be at least 0, not -16"),
        (CacheConfig(num_blocks=1), "--num-blocks must be 0 or at least 2, not 1"),
        (CacheConfig(kv_cache_gb=0.0), "--kv-cache-gb must be above 0, not 0.0"),
        (CacheConfig(gpu_memory_utilization=1.5), "--gpu-memory-utilization must be at most 1, not 1.5"),
        (CacheConfig(gpu_share=0.0), "--gpu-share must be above 0"),
        (ModelConfig(tp=0), "--tp must be at least 1, not 0"),
        (ModelConfig(max_model_len=1), "--max-model-len must be 0 or at least 2, not 1"),
        (HandoffConfig(connector="lmcache", pool_url="foo"), "--pool-url: the pool needs a URL like lm://"),
        (HandoffConfig(connector="mooncake", pool_url="lm://a:1"), "--pool-url: the pool needs a URL like mooncake://"),
        (HandoffConfig(control_port=70000), "--control-port must be at most 65535, not 70000"),
        (HandoffConfig(max_readers=0), "--max-readers must be at least 1, not 0"),
        (HandoffConfig(read_deadline_s=0.0), "--read-deadline-s must be above 0, not 0.0"),
        (ServerConfig(listen_fd=-2), "--listen-fd must be -1 or at least 0, not -2"),
        (ModelConfig(seed=1 << 64), "--seed must be at most 18446744073709551615, not 18446744073709551616"),
    ],
)
def test_settings(part: Any, says: str) -> None:
    sections = {"CacheConfig": "cache", "ModelConfig": "model", "HandoffConfig": "handoff", "ServerConfig": "server"}
    [problem] = setting_problems(replace(NodeConfig(), **{sections[type(part).__name__]: part}))
    assert problem.startswith(says)


@pytest.mark.parametrize(
    ("handoff", "missing", "says"),
    [
        (HandoffConfig(connector="foo"), "", "--connector: no connector is called 'foo'; known: nixl, "),
        (HandoffConfig(connector="a.b:"), "", "--connector: no connector is called 'a.b:'; known: nixl, "),
        (HandoffConfig(connector="a.b:C"), "a.b", "--connector: connector 'a.b:C': there is no module a.b"),
        (HandoffConfig(), "nixl_cu13", "--connector: connector 'nixl' needs a missing package: pip install"),
        (HandoffConfig(connector="lmcache"), "lmcache", "--connector: connector 'lmcache' needs a missing package"),
        (HandoffConfig(connector="lmcache"), "nixl_cu13", "--pool-handoff: connector 'nixl' needs a missing package"),
        (HandoffConfig(connector="mooncake"), "mooncake", "--connector: connector 'mooncake' needs a missing package"),
    ],
)
def test_connectors(handoff: HandoffConfig, missing: str, says: str) -> None:
    [problem] = machine_problems(NodeConfig(handoff=handoff), KnownMachine(missing))
    assert problem.startswith(says)


def test_cuda_is_asked_for_only_when_it_is_wanted() -> None:
    machine = KnownMachine(cuda="there is none")
    assert list(machine_problems(NodeConfig(model=ModelConfig(device="auto")), machine)) == []
    assert list(machine_problems(NodeConfig(model=ModelConfig(device="cuda")), machine)) == [
        "--device cuda: there is none"
    ]


@pytest.mark.parametrize(
    ("device", "gpus", "problems"),
    [
        ("cuda", 1, ["--tp 4: each rank needs a GPU of its own, and 1 is visible"]),
        ("auto", 2, ["--tp 4: each rank needs a GPU of its own, and 2 are visible"]),
        ("auto", 4, []),
        ("auto", 0, []),
        ("cpu", 2, []),
    ],
)
def test_each_rank_needs_a_gpu_where_there_are_gpus(device: str, gpus: int, problems: list[str]) -> None:
    config = NodeConfig(model=ModelConfig(device=device, tp=4))
    assert list(machine_problems(config, KnownMachine(gpus=gpus))) == problems


def test_what_ranks_cannot_share_is_named(tmp_path: Path) -> None:
    def problems(tp: int, **changes: Any) -> list[str]:
        told = json.loads((DEMO_MODEL / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**told, **changes}))
        config = NodeConfig(model=ModelConfig(load_format="dummy", tp=tp))
        return list(model_problems(config, tmp_path))

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}
    assert problems(1, **heads) == problems(2, **heads) == problems(4, **heads) == []
    assert problems(8, **heads) == [], "ranks may share a KV head"
    assert problems(3, **heads) == [
        "--tp 3: 4 KV heads cannot be split over 3 ranks",
        "--tp 3: 8 query heads cannot be split evenly over 3 ranks",
        "--tp 3: 512 activations of a feed-forward cannot be split evenly over 3 ranks",
    ]
    assert problems(4, **heads, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
                    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe") == [
        "--tp 4: 6 experts cannot be split evenly over 4 ranks"
    ]  # fmt: skip


def test_what_models_with_states_do_not_serve_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3.8-27b-fp8"]))
    config = NodeConfig(
        model=ModelConfig(load_format="dummy", tp=32), handoff=HandoffConfig(connector="mooncake", pool_url="")
    )
    assert list(model_problems(config, tmp_path)) == [
        "--connector mooncake: a pool takes no states, and Qwen3_5ForCausalLM keeps some",
        "--tp 32: 24 query heads cannot be split evenly over 32 ranks",
        "--tp 32: 16 key heads of delta rules cannot be split evenly over 32 ranks",
    ]


@pytest.mark.long
def test_modules_of_transformers_are_not_cut() -> None:
    config = NodeConfig(model=ModelConfig(model_impl="transformers", tp=2))
    assert [problem.split(": ")[1][:28] for problem in model_problems(config, DEMO_MODEL)] == [
        "transformers' modules comput"
    ]


def test_modules_are_found_without_being_imported() -> None:
    machine = MachineFacts()
    assert machine.has_module("pd_connectors.nixl.connector")
    assert not machine.has_module("pd_connectors.nixl.no_such_module")
    assert not machine.has_module("no_such_package.module")
    assert not machine.has_module("json.decoder.JSONDecoder"), "a class is no module"


@pytest.mark.parametrize(
    ("content", "says"), [(GARBAGE, "it is not text"), (b" \n", "is empty"), (None, "No such file")]
)
def test_keys(content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    [problem] = key_problems(str(path))
    assert problem.startswith(f"--cluster-key-file {path}")
    assert says in problem


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_what_is_no_key_file_is_not_read(path: str) -> None:
    assert list(key_problems(path)) == [f"--cluster-key-file {path}: it must be a file of at most 65536 bytes"]


def test_models(tmp_path: Path) -> None:
    config = NodeConfig(model=ModelConfig(max_model_len=1_000_000))
    assert list(model_problems(config, DEMO_MODEL)) == [
        "--max-model-len 1000000 exceeds the model's own limit of 4096 tokens"
    ]
    told = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert list(model_problems(NodeConfig(), tmp_path)) == [f"--model: {tmp_path} has no .safetensors file"]
    assert list(model_problems(NodeConfig(model=ModelConfig(load_format="dummy")), tmp_path)) == []
    (tmp_path / "config.json").write_text("{")
    assert "cannot read" in next(model_problems(NodeConfig(), tmp_path))


@pytest.mark.long  # it imports transformers' models
def test_an_architecture_that_nothing_serves(tmp_path: Path) -> None:
    told = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**told, "architectures": ["FooForCausalLM"]}))
    assert "architecture FooForCausalLM is not served" in next(model_problems(NodeConfig(), tmp_path))


COMMANDS = (
    ["--block-size=17"], ["--connector=foo"], ["--connector=lmcache", "--pool-url=foo"], ["--max-model-len=1000000"],
    ["--num-blocks=-3"], ["--cluster-key-file=/dev/null/x"], ["--kv-cache-gb=nan"],
    ["--tp=0"], ["--tp=3"],
)  # fmt: skip


@pytest.mark.long_cases
@pytest.mark.parametrize("command", ["up", "prefill", "decode", "mixed"])
@pytest.mark.parametrize("flags", COMMANDS, ids=" ".join)
def test_nothing_is_started(
    command: str, flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MachineFacts, "has_module", lambda machine, name: True)
    monkeypatch.setattr("pd_cluster.engine.process.spawn_engine", None)
    monkeypatch.setattr("pd_cluster.launch.supervise.Supervisor.start", None)
    assert main([command, "--port=0", *flags]) == 2
    first, *others = capsys.readouterr().err.removeprefix("pd-cluster: error: ").splitlines()
    flag = flags[-1].split("=")[0]
    assert first.startswith(flag)
    assert all(line.startswith(flag) for line in others), "a line for each part of the model that cannot be split"


@pytest.mark.long_cases
@pytest.mark.parametrize("command", ["up", "decode", "router", "pool", "check"])
@pytest.mark.parametrize("port", [99999, 65536, -1])
def test_no_command_takes_a_port_that_is_none(command: str, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--decode=http://127.0.0.1:1"] if command == "router" else []
    try:
        status = main([command, f"--port={port}", *extra])
    except SystemExit as stop:  # argparse
        status = int(str(stop.code))
    error = capsys.readouterr().err
    assert status == 2
    assert "--port" in error.splitlines()[0]


@pytest.mark.long
def test_no_torch_is_imported() -> None:
    """It costs seconds."""
    code = (
        "import sys; from pd_cluster.launch.cli import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    wrong = (["decode", "--max-model-len=1000000"], 1), (["up", "--port=0", "--device=cuda", "--block-size=17"], 2)
    for flags, num_wrong in wrong:
        done = subprocess.run(
            [sys.executable, "-c", code, *flags], capture_output=True, text=True, timeout=READY_DEADLINE_S, cwd=ROOT,
            env={"PYTHONPATH": SOURCES, "PATH": "", "HOME": "/nonexistent", "PD_CLUSTER_KEY": "x"},
        )  # fmt: skip
        assert (done.returncode, done.stderr.count("\n")) == (2, num_wrong), done.stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a CUDA device")
def test_a_machine_without_cuda_says_so() -> None:
    assert MachineFacts().cuda_problem() != ""
