"""Decides how many sequences and tokens a node serves at once, and how much GPU memory it fills, where no flag does.

Pure: it reads the settings, the model's shape and the size of the GPU's memory, and returns the decided settings with
the reason for each. The size of the cache is measured later (`memory_measurement.py`). The estimate here decides how
many sequences share the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError
from pd_cluster.scheduling.captured_sizes import bucket_sizes
from pd_cluster.scheduling.sequence_room import STATE_SLOTS, decode_blocks
from pd_cluster.worker.cuda_graphs.set_up import captured_bytes
from pd_connectors.protocol.layout import BlockLayout, KVKind
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    from pd_cluster.config import NodeConfig, SchedulerConfig
    from pd_cluster.models.spec import ModelSpec

# 256 decodes of 1k tokens take 16 ms a step (8B, one H200), and no larger step of decodes is captured
MOST_SEQS = 256
# A step's time grows with its rows on a CPU, and a request that arrives waits for the step that runs
CPU_SEQS = 8
# Also where memory is short: most sequences are shorter than TOKENS_PER_SEQ, and a request may ask for n answers
LEAST_SEQS = 16
# The prompt and half of the answer in conversations (the Azure trace). Longer sequences may be preempted
TOKENS_PER_SEQ = 1024
# The largest captured step. Larger ones compute prompts no faster (8B on an H200: products of 2,048 rows take 0.61 us a
# token and layer, of 8,192 rows 0.64) and hold up the streams beside them: ITL p99 of mixed nodes 49 ms, with 4,096 73
STEP_TOKENS = 2048
# Of a mixture's prefill node, where steps are measured: an expert of Qwen3-30B-A3B computes a sixteenth of the tokens
MOST_STEP_TOKENS = 8192
# Left for uses that are not measured: memory that the allocator cannot reuse, modules of kernels, the transport. The
# capture of graphs needs 1.1 GB of free memory
SPARE_SHARE, MOST_SPARE_BYTES = 0.1, 6e9
CUDA_CONTEXT_BYTES = 0.7e9  # memory of the driver and the libraries, which no allocator statistic shows
SAMPLING_BYTES_PER_LOGIT = 24  # for float32 and int64 copies of logits, when requests ask for all features
SAMPLES_PER_SEQ = 2  # a step samples at most this many tokens for each sequence that may run
GPU_BLOCK_SIZE = 64  # tokens, where no flag says another
_KV_DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}  # by bytes of a number: types of one size take as much


@dataclass(frozen=True, slots=True)
class Capacity:
    """The decided settings. `line` names them with their reasons, for a log."""

    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float  # as configured on a CPU, which does not use it
    line: str
    is_budget_measured: bool = False  # `max_num_batched_tokens` is an upper bound, until steps are measured

    def applied_to(self, config: NodeConfig) -> NodeConfig:
        """`config` with these settings."""
        return replace(
            config,
            scheduler=replace(
                config.scheduler,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
            ),
            cache=replace(config.cache, gpu_memory_utilization=self.gpu_memory_utilization),
        )


def decide_capacity(config: NodeConfig, spec: ModelSpec, dtype_bytes: int, gpu_bytes: int) -> Capacity:
    """Decide the settings that `config` leaves open. The settings that `config` gives stay as they are.

    `gpu_bytes`: the GPU's whole memory; 0: a CPU. `dtype_bytes`: bytes of one plain weight, and of one cached number
    unless the cache is fp8. Raises StartupError when the weights alone do not fit.
    """
    limits, cache = config.scheduler, config.cache
    given_seqs, given_budget = limits.max_num_seqs, limits.max_num_batched_tokens
    if not gpu_bytes:
        seqs = given_seqs or min(CPU_SEQS, given_budget or CPU_SEQS)
        budget = given_budget or max(STEP_TOKENS, seqs)
        line = f"max_num_seqs {seqs}, max_num_batched_tokens {budget} (CPU)"
        return Capacity(seqs, budget, cache.gpu_memory_utilization, line)
    utilization = cache.gpu_memory_utilization or _utilization(cache.gpu_share, gpu_bytes)
    kv_bytes = 1 if config.model.kv_cache_dtype == "fp8" else dtype_bytes
    memory = MemoryEstimate(
        limits, spec, dtype_bytes, gpu_bytes * utilization, kv_bytes, config.model.tp, cache.block_size
    )
    filled = f"{memory.own_bytes / 1e9:.1f} of {gpu_bytes / 1e9:.1f} GB"
    if cache.gpu_share < 1 and not cache.gpu_memory_utilization:
        filled += f", its share is {cache.gpu_share:g}"
    if memory.room < 0:
        weights = f"the weights of {spec.architecture} take {memory.weight_bytes / 1e9:.1f} GB"
        raise StartupError(f"{weights}; of the GPU's memory this node may fill {filled}")
    length = min(TOKENS_PER_SEQ, config.model.max_model_len or spec.max_len)
    seqs = given_seqs or memory.most_seqs(length)
    is_measured = not given_budget and spec.experts is not None and config.server.role == "prefill"
    is_measured &= cache.gpu_share == 1
    budget = given_budget or max(MOST_STEP_TOKENS if is_measured else STEP_TOKENS, seqs)
    reason = "at most; steps will be measured" if is_measured else "larger steps are no faster"
    room = f"room for {memory.cached_seqs(seqs, length):,} sequences of {length:,} tokens"
    longest = min(config.model.max_model_len or spec.max_len, max(length, memory.cache_tokens(seqs)))
    has_parts = any(spec.windows) or spec.state is not None  # a sequence does not hold so much for each token
    reasons = (
        f"max_num_seqs {seqs} ({'given; ' if given_seqs else ''}{room})",
        f"max_num_batched_tokens {budget} ({'given' if given_budget else reason})",
        f"gpu_memory_utilization {utilization:.3g} ({'given; ' if cache.gpu_memory_utilization else ''}{filled})",
        *([f"KV of a sequence: {memory.held_line(length)}, {memory.held_line(longest)}"] if has_parts else ()),
    )
    return Capacity(seqs, budget, utilization, ", ".join(reasons), is_measured)


def longest_sequence(wanted: int, limit: int, cache_tokens: int) -> int:
    """Tokens of the longest sequence that a node serves when its cache fills all memory that is left.

    `wanted`: --max-model-len, 0 if not given. `limit`: the given length, or the model's own limit. Raises StartupError
    when the cache has no room for the wanted length. The model's own limit is lowered instead: a node that offered more
    would refuse every chat request without max_tokens.
    """
    if wanted > cache_tokens:
        raise StartupError(
            f"--max-model-len {wanted}: the KV cache has room for {cache_tokens} tokens; lower it, or give the node "
            "more memory"
        )
    return min(limit, cache_tokens)


class MemoryEstimate:
    """Bytes that a model needs on a GPU, and the sequences that the cache in the rest has room for."""

    def __init__(
        self, limits: SchedulerConfig, spec: ModelSpec, dtype_bytes: int, own_bytes: float, kv_bytes: int, tp: int = 1,
        block_size: int = 0,
    ) -> None:  # fmt: skip
        """`own_bytes`: bytes of the GPU's memory that the node may fill; `kv_bytes`: of one cached number.

        `tp`: ranks that share the weights. The estimate is for one of them. `block_size`: 0: GPU_BLOCK_SIZE.
        """
        self._limits = limits
        self._vocab_size, self._dtype_bytes = spec.vocab_size, dtype_bytes
        num_kv_heads = max(1, spec.num_kv_heads // tp)
        heads = spec.num_heads // tp + 2 * num_kv_heads
        activations = 4 * spec.hidden_size + 2 * heads * spec.head_dim + 3 * spec.intermediate_size // tp  # of a token
        self._step_bytes = (limits.max_num_batched_tokens or STEP_TOKENS) * activations * dtype_bytes
        groups = spec.kv_groups(block_size or GPU_BLOCK_SIZE, _KV_DTYPES[kv_bytes])
        slabs = KvSlabs.of_blocks(BlockLayout(groups, tp), 1)
        sizes = [(group, slabs.stride(index)) for index, group in enumerate(groups)]
        self._paged = [(group, size) for group, size in sizes if group.kind is not KVKind.STATE]
        self._kv_bytes = sum(size // group.block_size for group, size in self._paged)  # of a token in every group
        self._state_bytes = sum(size for group, size in sizes if group.kind is KVKind.STATE)
        self.weight_bytes = spec.weight_bytes(dtype_bytes, tp)
        self.own_bytes = own_bytes

    @property
    def room(self) -> float:
        """Bytes for cache, activations and graphs; negative when the weights do not fit."""
        return self.own_bytes - CUDA_CONTEXT_BYTES - self.weight_bytes

    def sequence_bytes(self, num_tokens: int) -> int:
        """Bytes of KV and state that a decoding sequence of `num_tokens` holds, at most those of its tokens."""
        unread = sum(
            size * (-(-num_tokens // group.block_size) - decode_blocks(group, num_tokens))
            for group, size in self._paged
        )
        return num_tokens * self._kv_bytes - unread + self._state_bytes

    def prefill_bytes(self, num_tokens: int) -> int:
        """Bytes that a sequence of `num_tokens` holds when its prefill begins."""
        return num_tokens * self._kv_bytes + STATE_SLOTS * self._state_bytes

    def cache_bytes(self, seqs: int) -> float:
        """Bytes that are left for the cache beside steps of `seqs` sequences."""
        sampling = seqs * SAMPLES_PER_SEQ * self._vocab_size * SAMPLING_BYTES_PER_LOGIT
        graphs = 0.0
        if self._limits.cuda_graphs:
            limits = replace(self._limits, max_num_seqs=seqs, max_num_batched_tokens=0)
            has_drafts = limits.speculation != "none"  # before a plan knows: at least what is taken
            graphs = captured_bytes(
                limits, self._vocab_size * self._dtype_bytes, has_drafts=has_drafts, has_states=self._state_bytes > 0
            )
        return max(0.0, self.room - self._step_bytes - sampling - graphs)

    def cache_tokens(self, seqs: int) -> int:
        """Tokens of the longest sequence that can be prefilled alone, beside buffers for steps of `seqs` sequences."""
        return max(0, int((self.cache_bytes(seqs) - self.prefill_bytes(0)) // self._kv_bytes))

    def cached_seqs(self, seqs: int, length: int) -> int:
        """Sequences of `length` tokens that the cache has room for: one is prefilled while the others decode."""
        rest = self.cache_bytes(seqs) - self.prefill_bytes(length)
        return max(0, 1 + int(rest // self.sequence_bytes(length)))

    def held_line(self, num_tokens: int) -> str:
        """What a decoding sequence of `num_tokens` holds, and what it holds when its prefill begins, for a log."""
        held, whole = self.sequence_bytes(num_tokens), self.prefill_bytes(num_tokens)
        states = f" ({self._state_bytes / 1e6:,.0f} and {STATE_SLOTS * self._state_bytes / 1e6:,.0f} of states)"
        told = states if self._state_bytes else ""
        return f"{held / 1e6:,.0f} of {whole / 1e6:,.0f} MB{told} with {num_tokens:,} tokens"

    def most_seqs(self, length: int) -> int:
        """The largest captured number of sequences of `length` tokens for which there is room, at least 1.

        For LEAST_SEQS sequences or fewer, room for one of them is enough. The number is at most the tokens of a step,
        because each sequence needs one of these.
        """
        sizes = bucket_sizes(min(MOST_SEQS, self._limits.max_num_batched_tokens or MOST_SEQS))
        return max((n for n in sizes if self.cached_seqs(n, length) >= (n if n > LEAST_SEQS else 1)), default=1)


def _utilization(gpu_share: float, gpu_bytes: int) -> float:
    return gpu_share - min(SPARE_SHARE * gpu_share, MOST_SPARE_BYTES / gpu_bytes)
