"""What a node takes on when no flag says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.shapes import CONFIGS
from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig, ServerConfig
from pd_cluster.errors import StartupError
from pd_cluster.models.registry import resolve_spec
from pd_cluster.worker.capacity import MemoryEstimate, decide_capacity, longest_sequence

H200, H100, SMALL = 150.1e9, 85.0e9, 25.4e9  # bytes of memory
SPECS = {
    shape: resolve_spec(Path(), CONFIGS[shape])
    for shape in ("8b", "0.6b", "gemma3-27b", "gpt-oss-20b", "gpt-oss-120b", "qwen3.6-35b-a3b-fp8")
}
BF16 = 2


def decided(shape: str, gpu_bytes: float, config: NodeConfig) -> tuple[int, int, float, str]:
    """Sequences, tokens of a step and share of the memory, rounded; and the line."""
    capacity = decide_capacity(config, SPECS[shape], BF16, int(gpu_bytes))
    applied = capacity.applied_to(config)
    limits, utilization = applied.scheduler, applied.cache.gpu_memory_utilization
    return limits.max_num_seqs, limits.max_num_batched_tokens, round(utilization, 3), capacity.line


@pytest.mark.parametrize(
    ("shape", "gpu_bytes", "gpu_share", "expected"),
    [
        ("8b", H200, 1, (256, 2048, 0.96)),  # what the benchmarks are measured with
        ("0.6b", H200, 1, (256, 2048, 0.96)),
        ("8b", H200, 0.5, (256, 2048, 0.46)),
        ("8b", H200, 0.25, (96, 2048, 0.225)),
        ("8b", H100, 1, (256, 2048, 0.929)),
        ("8b", SMALL, 1, (32, 2048, 0.9)),
        ("0.6b", SMALL, 1, (144, 2048, 0.9)),
        ("0.6b", SMALL, 0.5, (64, 2048, 0.45)),
        ("0.6b", SMALL, 0.25, (16, 2048, 0.225)),
        ("0.6b", 8e9, 0.5, (16, 2048, 0.45)),  # room for 5 of 1,024 tokens: short ones are served together
        ("0.6b", 8e9, 0.4, (1, 2048, 0.36)),  # hardly any room: it starts all the same
        ("8b", 0, 1, (8, 2048, 0)),  # a CPU
    ],
)
def test_devices(shape: str, gpu_bytes: float, gpu_share: float, expected: tuple[int, int, float]) -> None:
    config = NodeConfig(cache=CacheConfig(gpu_share=gpu_share))
    assert decided(shape, gpu_bytes, config)[:3] == expected


@pytest.mark.parametrize("gpu_bytes", [0, H200])
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (SchedulerConfig(max_num_seqs=7), (7, 2048)),
        (SchedulerConfig(max_num_seqs=4000), (4000, 4000)),  # every decode needs a token of the budget
        (SchedulerConfig(max_num_batched_tokens=4), (4, 4)),
        (SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8192), (9, 8192)),
    ],
)
def test_flags_win(gpu_bytes: float, limits: SchedulerConfig, expected: tuple[int, int]) -> None:
    assert decided("8b", gpu_bytes, NodeConfig(scheduler=limits))[:2] == expected


def test_a_given_share_of_the_memory_wins_and_decides_the_rest() -> None:
    config = NodeConfig(cache=CacheConfig(gpu_memory_utilization=0.3, gpu_share=0.5))
    assert decided("8b", H200, config)[:3] == (176, 2048, 0.3)


def test_a_decided_configuration_is_not_decided_again() -> None:
    config = NodeConfig()
    once = decide_capacity(config, SPECS["8b"], BF16, int(SMALL)).applied_to(config)
    assert decide_capacity(once, SPECS["0.6b"], BF16, int(H200)).applied_to(once) == once


def test_a_mixtures_prefill_node_measures_its_steps() -> None:
    mixture = resolve_spec(Path(), CONFIGS["30b-a3b"])

    def budget(role: str, told: int = 0, gpu_bytes: float = H200) -> tuple[int, bool]:
        config = NodeConfig(
            server=ServerConfig(role=role),
            scheduler=SchedulerConfig(max_num_batched_tokens=told),
        )
        capacity = decide_capacity(config, mixture, BF16, int(gpu_bytes))
        assert ("steps will be measured" in capacity.line) == capacity.is_budget_measured
        return capacity.max_num_batched_tokens, capacity.is_budget_measured

    assert budget("prefill") == (8192, True)
    assert [budget("decode"), budget("mixed"), budget("prefill", gpu_bytes=0)] == [(2048, False)] * 3
    assert budget("prefill", told=4096) == (4096, False)
    prefill = NodeConfig(server=ServerConfig(role="prefill"))
    assert not decide_capacity(prefill, SPECS["8b"], BF16, int(H200)).is_budget_measured


def test_short_sequences_need_less_room_and_no_graphs_leave_more() -> None:
    short = NodeConfig(model=ModelConfig(max_model_len=256))
    eager = NodeConfig(scheduler=SchedulerConfig(cuda_graphs=False))
    assert [decided("8b", SMALL, config)[0] for config in (NodeConfig(), short, eager)] == [32, 112, 40]


def test_the_line_gives_reasons() -> None:
    assert decided("8b", H200, NodeConfig())[3] == (
        "max_num_seqs 256 (room for 921 sequences of 1,024 tokens), "
        "max_num_batched_tokens 2048 (larger steps are no faster), "
        "gpu_memory_utilization 0.96 (144.1 of 150.1 GB)"
    )
    given = NodeConfig(
        scheduler=SchedulerConfig(max_num_seqs=512, max_num_batched_tokens=4096),
        cache=CacheConfig(gpu_memory_utilization=0.4, gpu_share=0.5),
    )
    assert decided("8b", H200, given)[3] == (
        "max_num_seqs 512 (given; room for 278 sequences of 1,024 tokens), max_num_batched_tokens 4096 (given), "
        "gpu_memory_utilization 0.4 (given; 60.0 of 150.1 GB)"
    )
    assert decided("8b", 0, NodeConfig())[3] == "max_num_seqs 8, max_num_batched_tokens 2048 (CPU)"


def test_weights_that_do_not_fit_are_refused_before_they_are_read() -> None:
    shared = NodeConfig(cache=CacheConfig(gpu_share=0.5))
    with pytest.raises(StartupError, match=r"take 16.1 GB; .* fill 11.4 of 25.4 GB, its share is 0.5$"):
        decided("8b", SMALL, shared)
    with pytest.raises(StartupError, match=r"the weights of LlamaForCausalLM take 16.1 GB; .* fill 14.4 of 16.0 GB$"):
        decided("8b", 16e9, NodeConfig())


@pytest.mark.parametrize(
    ("shape", "weights_gb", "kv_bytes"),
    [("8b", 16.06, 131_072), ("0.6b", 1.19, 114_688), ("gpt-oss-20b", 13.74, 49_152), ("gpt-oss-120b", 65.14, 73_728)],
)
def test_the_estimate_knows_weights_and_kv(shape: str, weights_gb: float, kv_bytes: int) -> None:
    small, large = (
        MemoryEstimate(SchedulerConfig(), SPECS[shape], BF16, own_bytes, BF16) for own_bytes in (90e9, 100e9)
    )
    assert small.weight_bytes / 1e9 == pytest.approx(weights_gb, rel=0.005)
    assert large.cache_tokens(64) - small.cache_tokens(64) == pytest.approx(10e9 / kv_bytes, rel=1e-4)


def test_windows_leave_room_for_more_long_sequences() -> None:
    spec = SPECS["gemma3-27b"]
    windows = MemoryEstimate(SchedulerConfig(), spec, BF16, H200 * 0.96, BF16)
    whole = MemoryEstimate(SchedulerConfig(), replace(spec, windows=(0,) * 62), BF16, H200 * 0.96, BF16)
    rooms = [
        (one.cached_seqs(144, 1024), one.cached_seqs(144, 32_768), one.cache_tokens(144)) for one in (windows, whole)
    ]
    assert rooms == [(164, 23, 168_140), (164, 5, 168_140)]
    # a window, and of the other layers all tokens
    window, full = 52 * 16 * 2 * 64 * 128 * BF16, 10 * 16 * 2 * 64 * 128 * BF16
    assert windows.sequence_bytes(32_768) == 16 * window + 512 * full
    assert windows.sequence_bytes(640) == whole.sequence_bytes(640) == 10 * (window + full)


def test_the_line_tells_what_sequences_of_a_model_with_windows_hold() -> None:
    assert decided("gemma3-27b", H200, NodeConfig(model=ModelConfig(max_model_len=32_768)))[3].endswith(
        "KV of a sequence: 520 of 520 MB with 1,024 tokens, 3,121 of 16,643 MB with 32,768 tokens"
    )
    assert decided("gemma3-27b", H100, NodeConfig())[3].endswith("4,027 of 22,211 MB with 43,731 tokens")
    assert (
        "KV of a sequence: 87 of 152 MB (66 and 131 of states) with 1,024 tokens, 5,434 of 5,500 MB"
        in decided("qwen3.6-35b-a3b-fp8", H200, NodeConfig())[3]
    )


@pytest.mark.parametrize(("gpu_bytes", "least_tokens"), [(H200, 1_500_000), (H100, 150_000)])
def test_gpt_oss_leaves_room_and_hands_over_little(gpu_bytes: float, least_tokens: int) -> None:
    """The windows of half of the layers are two or three blocks."""
    spec, share = SPECS["gpt-oss-120b"], decided("gpt-oss-120b", gpu_bytes, NodeConfig())[2]
    memory = MemoryEstimate(SchedulerConfig(), spec, BF16, gpu_bytes * share, BF16)
    assert memory.cached_seqs(256 if gpu_bytes == H200 else 144, 1024) * 1024 > least_tokens
    groups = spec.kv_groups(64, "bfloat16")
    assert sum(group.block_bytes * len(group.handed_over(8000)) for group in groups) == 128 * 2_359_296 < 305e6


def test_a_rank_has_its_part_of_the_weights_and_the_whole_embedding() -> None:
    spec = SPECS["8b"]
    whole, part = (MemoryEstimate(SchedulerConfig(), spec, BF16, 60e9, BF16, tp).weight_bytes for tp in (1, 2))
    embedding = spec.vocab_size * spec.hidden_size * BF16
    assert part == (whole - embedding) / 2 + embedding


@pytest.mark.parametrize(
    ("wanted", "limit", "cache_tokens", "expected"),
    [(0, 131_072, 24_576, 24_576), (0, 4096, 24_576, 4096), (4096, 4096, 24_576, 4096), (64, 64, 64, 64)],
)
def test_no_sequence_is_longer_than_the_cache(wanted: int, limit: int, cache_tokens: int, expected: int) -> None:
    assert longest_sequence(wanted, limit, cache_tokens) == expected


def test_a_length_that_was_asked_for_and_does_not_fit_is_refused() -> None:
    with pytest.raises(StartupError, match=r"--max-model-len 131072: the KV cache has room for 24576 tokens"):
        longest_sequence(131_072, 131_072, 24_576)
