"""Finds what would keep a node from starting: in its settings, its model's config or its machine.

Takes milliseconds and does not import torch. It reports certain problems only. The engine checks again, and also what
only the engine can know (memory, weights, a device that fails).
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster.config import CacheConfig
from pd_cluster.errors import StartupError
from pd_cluster.models.directory import read_json
from pd_cluster.models.end_tokens import read_end_tokens
from pd_cluster.models.model_files import check_texts, content_problems
from pd_cluster.models.model_task import read_task
from pd_cluster.models.registry import choose_implementation
from pd_cluster.models.shard import Shard
from pd_cluster.server.params.sampling import SamplingDefaults
from pd_cluster.worker.host_room import free_host_bytes, host_problem
from pd_connectors.pool_url import DEFAULT_URLS, read_pool_url
from pd_connectors.protocol.errors import ConnectorUnavailable
from pd_connectors.protocol.keys import load_cluster_key
from pd_connectors.registry import check_connector
from pd_http.settings import in_bounds, number_problems

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pd_cluster.config import ModelConfig, NodeConfig
    from pd_cluster.models.spec import ModelSpec

HASH_UNIT = 16  # tokens; a block size is a multiple of it
MAX_KEY_BYTES = 1 << 16
DRIVER_DEADLINE_S = 30.0
_PLATFORM = re.compile(r"^(cuda|hip)\b[^=]*= *(\S+)$", re.MULTILINE)  # in torch/version.py
# Run in another process, to keep the driver's state out of this one. CUDA's count respects CUDA_VISIBLE_DEVICES.
_COUNT_DEVICES = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(count.value if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0)
"""


class MachineFacts:
    """Facts about this machine. Tests replace it."""

    def has_module(self, name: str) -> bool:
        """Whether Python can find this module. Its parent packages are imported, the module is not."""
        try:
            return importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            return False

    def cuda_problem(self) -> str:
        """Why no CUDA device is usable; "" when one is."""
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return "torch is not installed"
        version = Path(spec.origin).with_name("version.py")
        platforms = dict(_PLATFORM.findall(version.read_text())) if version.is_file() else {}
        if platforms.get("hip", "None") != "None":
            return ""  # torch calls AMD's GPUs "cuda" too, and only torch can look for them
        if platforms.get("cuda") == "None":
            return "the installed torch is built without CUDA"
        try:
            return "" if self.num_cuda_devices() else "this machine has no CUDA device"
        except subprocess.TimeoutExpired:
            return f"the CUDA driver does not answer within {DRIVER_DEADLINE_S:g} s"

    def free_host_bytes(self) -> int:
        """Host memory that may still be taken here."""
        return free_host_bytes()

    def num_cuda_devices(self) -> int:
        """CUDA devices that a process may use here; 0 also without a driver. Raises subprocess.TimeoutExpired."""
        command = [sys.executable, "-P", "-c", _COUNT_DEVICES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_DEADLINE_S)
        return int(done.stdout) if done.returncode == 0 else 0


def setting_problems(config: NodeConfig) -> Iterator[str]:
    """Settings that are wrong on every machine."""
    for section in fields(config):
        yield from number_problems(getattr(config, section.name))
    if (block_size := in_bounds(config.cache).block_size) % HASH_UNIT:
        yield f"--block-size {block_size} is not a multiple of {HASH_UNIT}"
    handoff = config.handoff
    if (default_url := DEFAULT_URLS.get(handoff.connector)) is not None:
        try:
            read_pool_url(handoff.pool_url, default_url)
        except ConnectorUnavailable as error:
            yield f"--pool-url: {error}"


def tls_problems(config: NodeConfig) -> Iterator[str]:
    """Certificate files that cannot be used."""
    try:
        config.http.check_tls()
    except StartupError as error:
        yield str(error)


def machine_problems(config: NodeConfig, machine: MachineFacts) -> Iterator[str]:
    """Packages and devices that these settings need and this machine lacks."""
    handoff = config.handoff
    connectors = [("--connector", handoff.connector)]
    if handoff.connector in DEFAULT_URLS:
        connectors.append(("--pool-handoff", handoff.pool_handoff))
    for flag, name in connectors:
        try:
            check_connector(name, machine.has_module)
        except ConnectorUnavailable as error:
            yield f"{flag}: {error}"
    yield from _tier_problems(in_bounds(config.cache), in_bounds(config.model).tp, machine)
    if config.model.device == "cuda" and (why := machine.cuda_problem()):
        yield f"--device cuda: {why}"
    elif (tp := in_bounds(config.model).tp) > 1 and config.model.device != "cpu":
        try:
            count = machine.num_cuda_devices()
        except subprocess.TimeoutExpired:
            return  # the engine reports it
        if 0 < count < tp:  # without a GPU the ranks run on the CPU
            yield f"--tp {tp}: each rank needs a GPU of its own, and {count} {'are' if count > 1 else 'is'} visible"


def _tier_problems(cache: CacheConfig, tp: int, machine: MachineFacts) -> Iterator[str]:
    """Tiers after the device's cache that the machine has no room for, or that nothing would use."""
    if cache.host_cache_gb:
        flag = "--host-cache-gb" if cache.host_cache_gb >= cache.swap_gb else "--swap-gb"
        if why := host_problem(flag, cache.host_gb, tp, machine.free_host_bytes()):
            yield why
        if not cache.prefix_caching:
            yield "--host-cache-gb keeps prefixes, of which --no-prefix-caching has none; preempted ones need --swap-gb"
    if not cache.disk_cache_dir:
        if cache.disk_cache_gb != CacheConfig().disk_cache_gb:
            yield f"--disk-cache-gb {cache.disk_cache_gb:g} needs --disk-cache-dir: without it there are no files"
        return
    if not cache.host_cache_gb:
        yield "--disk-cache-dir needs --host-cache-gb, through which its blocks go"
    if tp > 1:
        yield "--disk-cache-dir serves nodes with --tp 1 only"


def shared_memory_problems(nodes: Iterable[NodeConfig], machine: MachineFacts) -> Iterator[str]:
    """What several nodes, each of which this machine can serve, cannot have at once."""
    wanted_gb = sum(node.cache.host_gb * node.model.tp for node in nodes if node.cache.host_cache_gb)
    if why := host_problem("--host-cache-gb, of all nodes", wanted_gb, 1, machine.free_host_bytes()):
        yield why


def key_problems(key_file: str) -> Iterator[str]:
    """Problems of the cluster's key; without a file, of the key in the environment or of this user."""
    source = f"--cluster-key-file {key_file}" if key_file else "the cluster key"
    path = Path(key_file)
    try:
        if key_file and path.exists() and (not path.is_file() or path.stat().st_size > MAX_KEY_BYTES):
            yield f"{source}: it must be a file of at most {MAX_KEY_BYTES} bytes"
            return
        load_cluster_key(key_file)
    except UnicodeDecodeError:
        yield f"{source}: it is not text"
    except (OSError, ValueError) as error:
        yield f"{source} cannot be read: {error}"


def model_problems(config: NodeConfig, directory: Path) -> Iterator[str]:
    """What cannot be served in the model's directory with these settings."""
    try:
        yield from _problems_of(in_bounds(config.model), config.handoff.connector, directory)
    except StartupError as error:
        yield f"--model: {error}"


def _problems_of(settings: ModelConfig, connector: str, directory: Path) -> Iterator[str]:
    """Raises StartupError, too."""
    check_texts(directory)
    raw = read_json(directory / "config.json")
    spec, _ = choose_implementation(directory, raw, settings.model_impl)
    if settings.max_model_len > spec.max_len:
        yield f"--max-model-len {settings.max_model_len} exceeds the model's own limit of {spec.max_len} tokens"
    if spec.state is not None and connector in DEFAULT_URLS:
        yield f"--connector {connector}: a pool takes no states, and {spec.architecture} keeps some"
    if settings.tp > 1:
        yield from _cut_problems(spec, settings.tp)
    read_end_tokens(directory, raw)
    SamplingDefaults.choose(settings.generation_config, directory)
    read_task(settings.task, directory)
    if settings.load_format != "dummy":
        found = content_problems(directory, MachineFacts().has_module, needs_index=spec.modules is not None)
        yield from (f"--model: {problem}" for problem in found)


def _cut_problems(spec: ModelSpec, tp: int) -> Iterator[str]:
    """What `tp` ranks cannot share."""
    if spec.modules is not None:
        yield f"--tp {tp}: transformers' modules compute this model, and only families of this package are cut"
        return
    parts = {"query heads": spec.num_heads}
    if spec.experts is None or spec.experts.dense_layers:
        parts["activations of a feed-forward"] = spec.intermediate_size
    if spec.experts is not None:
        parts |= {"experts": spec.experts.num_experts, "activations of the shared expert": spec.experts.shared_size}
    if spec.state is not None:
        parts["key heads of delta rules"] = spec.state.key_heads
    shard = Shard(0, tp)
    for what, total in [("KV heads", spec.num_kv_heads), *parts.items()]:
        try:
            shard.kv_heads(total) if what == "KV heads" else shard.part(total, what)
        except StartupError as error:
            yield str(error)
