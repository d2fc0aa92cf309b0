"""Every setting of a node, declared once. The command line is generated from these fields (`pd_http/settings.py`).

Derived values are properties. Nothing here touches a file, a device or the network.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from pd_cluster.errors import StartupError
from pd_http.limits import HttpLimits
from pd_http.settings import MAX_PORT, check_numbers, setting

TOOL_FORMATS = (
    "qwen3_coder",
    "glm47",
    "glm45",
    "hermes",
    "minimax_m2",
    "mistral_args",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "gpt_oss",
    "llama3_json",
)  # `server/tools/tool_format.py` describes them


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is held."""

    model: str = setting(
        "", "Model directory, hub id, or a model of the package: demo_model (the default), tool_model."
    )
    served_model_name: tuple[str, ...] = setting(
        (), "Names in the API. Answers have the first one. Default: the model directory's name.", metavar="NAME"
    )
    chat_template: str = setting("", "File with a chat template (Jinja). Default: the model's own.", metavar="FILE")
    generation_config: str = setting(
        "auto",
        "Sampling of requests that do not say otherwise. auto: generation_config.json of the model; none, or vllm: "
        "OpenAI's defaults; else a directory with such a file.",
        metavar="auto|none|DIR",
    )
    dtype: str = setting(
        "auto",
        "Weights' dtype. auto: the model's own, float32 on CPU.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Dtype of cached keys and values. auto: the weights'. fp8: float8_e4m3fn with scale 1, in half the memory and "
        "half the bytes of a handoff. Give every node the same one: a node prefills by itself what another one has "
        "in another dtype.",
        choices=("auto", "fp8"),
    )
    device: str = setting(
        "auto", "Where the engine runs. auto: cuda when there is one.", choices=("auto", "cpu", "cuda")
    )
    model_impl: str = setting(
        "auto",
        "What computes the model: native, a family of this package; transformers, the modules of transformers, right "
        "for most decoders and not fast. auto: native where it serves the model; the start says why not.",
        choices=("auto", "native", "transformers"),
    )
    task: str = setting(
        "auto",
        "What the model is served for: answers (generate), vectors of texts (embed), or scores of documents by a "
        "causal reranker (score). auto: as modules.json of sentence-transformers says, else generate.",
        choices=("auto", "generate", "embed", "score"),
    )
    attention_backend: str = setting(
        "auto",
        "Attention backend of every KV group, such as triton. auto: the first that serves a group; the start names it, "
        "and says why those before it do not.",
    )
    max_model_len: int = setting(0, "Longest prompt + output in tokens. 0: the model's own limit.", least=2)
    load_format: str = setting("auto", "dummy: random weights from the config alone.", choices=("auto", "dummy"))
    seed: int = setting(  # in torch's range
        0, "Seeds dummy weights and requests that bring no seed.", least=-(1 << 63), most=(1 << 64) - 1
    )
    tp: int = setting(1, "Ranks that share the weights (tensor parallelism), a process, a GPU each.", least=1, most=64)
    num_threads: int = setting(0, "Compute threads on CPU. 0: torch's choice.")
    logits_stages: tuple[str, ...] = setting(
        (),
        "A further logits stage, package.module:Class; may be repeated. Give every node the same ones: a node draws "
        "the first token again if its prefill node has others.",
        flag="logits_stage",
        metavar="MODULE:CLASS",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = setting(0, "Tokens per block, a multiple of 16. 0: 16 on CPU, 64 on GPUs.")
    num_blocks: int = setting(
        0, "Blocks of each KV group. 0: from kv_cache_gb (CPU) or gpu_memory_utilization.", least=2, hidden=True
    )
    kv_cache_gb: float = setting(1.0, "Cache size on CPU in GB, when num_blocks is 0.", positive=True)
    gpu_memory_utilization: float = setting(
        0.0,
        "Share of the GPU's memory that weights, activations and cache may fill. 0: gpu_share, less a tenth of that, "
        "at most 6 GB.",
        most=1,
    )
    gpu_share: float = setting(
        1.0, "Part of the GPU that this node has where several nodes share the GPU; `up` and Ray set it.",
        most=1, positive=True,
    )  # fmt: skip
    swap_gb: float = setting(0.0, "Host memory for preempted sequences in GB, on each rank. 0: preemption recomputes.")
    host_cache_gb: float = setting(
        0.0,
        "Host memory in GB, on each rank, that keeps blocks of prefixes for which the cache has no room. It is pinned "
        "while the node serves. swap_gb is a part of it. 0: none.",
    )
    disk_cache_dir: str = setting(
        "",
        "Directory of this node alone, for files of blocks for which host_cache_gb, which it needs, has no room. They "
        "survive restarts with the same cluster key. Default: none.",
        metavar="DIR",
    )
    disk_cache_gb: float = setting(100.0, "Size of these files in GB.", positive=True)
    prefix_caching: bool = setting(True, "Reuse the blocks of equal prefixes.")

    @property
    def host_gb(self) -> float:
        """GB of host memory for blocks, on each rank."""
        return max(self.host_cache_gb, self.swap_gb)


LORA_SLOTS = 8  # where adapters are given or may be loaded, and no number is


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Adapters beside the model. Without slots there are none, and they cost no memory, no graphs and no start time."""

    lora: tuple[str, ...] = setting(
        (),
        "Adapters from the start: a name, which requests give as their model, and the directory that peft saved, or "
        "its hub id.",
        metavar="NAME=DIR",
    )
    lora_dir: str = setting(
        "",
        "Directory below which orders may load adapters (POST /v1/load_lora_adapter); every node needs one with the "
        "same files. Default: such orders are refused.",
        metavar="DIR",
    )
    lora_slots: int = setting(
        0,
        "Adapters on the device at once, on each rank, so as many as one step may use. Their memory is taken before "
        "the cache is sized. 0: adapters are not served; 8 with --lora or --lora-dir.",
        most=1024,
    )
    max_lora_rank: int = setting(
        16, "The highest rank of an adapter: a slot has room for it in each layer.", least=1, most=256
    )
    lora_host_gb: float = setting(
        4.0, "Host memory in GB, on each rank, for adapters that were read. Others are read again.", positive=True
    )

    def __post_init__(self) -> None:
        if (self.lora or self.lora_dir) and not self.lora_slots:
            object.__setattr__(self, "lora_slots", LORA_SLOTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold, and how steps follow each other.

    `max_num_seqs` and `max_num_batched_tokens` are above 0 once the executor has decided them (`worker/capacity.py`).
    """

    max_num_seqs: int = setting(
        0, "Sequences that run at once. 0: as many as a GPU's memory has room for, at most 256; 8 on CPU."
    )
    max_num_batched_tokens: int = setting(
        0,
        "Token budget of one step; longer prompts are cut into chunks. 0: 2048, or max_num_seqs where that is more; "
        "for a mixture of experts on a prefill node's GPU up to 8192, measured at start.",
    )
    slo_ttft_ms: float = setting(
        0.0,
        "Target of a request's time to first token in ms: a prompt that would miss it takes all slack of the streams "
        "beside it. 0: none.",
    )
    slo_tpot_ms: float = setting(
        0.0,
        "Target of a stream's time per output token in ms: a step takes the prompt tokens with which every stream "
        "stays within it. Prompts of a prefill node come first: they take steps that keep gaps within slo_itl_ms. "
        "0: none.",
    )
    slo_itl_ms: float = setting(
        0.0,
        "Target of the longest time between two tokens in ms: what cuts prompts into pieces beside streams. "
        "0: 3 x slo_tpot_ms; without that, on a decode node's GPU 1.44 times as long as 32 decodes take (for 8B on an "
        "H200 7.7: a step of 192 tokens with 32 decodes), beside long streams as long as so many tokens of a prompt "
        "like theirs take, up to 38; on a prefill node's GPU 38, beside streams that it keeps; else none.",
    )
    queue: str = setting(
        "shortest",
        "Which prompt is next. shortest: the one with the least work, less its age. fifo: the oldest.",
        choices=("shortest", "fifo"),
    )
    max_waiting: int = setting(
        1024, "Prompts that may queue before new ones get 503. The prompts of one request may fill half of it."
    )
    priorities: bool = setting(
        False, "Honour the field `priority` of requests. Only where all clients are trusted: any may ask for the best."
    )
    speculation: str = setting(
        "none",
        "What guesses further tokens of streams, which a step verifies; answers stay the same. lookup: what followed "
        "a stream's last tokens before, in its answer, its prompt, or the client's prediction.",
        choices=("none", "lookup"),
    )
    max_drafts: int = setting(16, "Tokens that a step verifies for one stream at most.", least=1, most=64)
    async_scheduling: str = setting(
        "auto", "Plan and launch a step while the one before it runs. auto: on GPUs.", choices=("auto", "on", "off"),
        hidden=True,
    )  # fmt: skip
    cuda_graphs: bool = setting(True, "On GPUs, replay steps as captured graphs.")
    max_graph_batch: int = setting(
        256, "Largest decode batch that is captured as a graph (at most max_num_seqs).", least=1, hidden=True
    )
    max_graph_tokens: int = setting(2048, "Largest step with prompts captured as a graph. 0: none.", hidden=True)

    def __post_init__(self) -> None:
        check_numbers(self)
        seqs, budget = self.max_num_seqs, self.max_num_batched_tokens
        if 0 < budget < seqs:
            raise StartupError(f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({seqs})")

    @property
    def has_targets(self) -> bool:
        """Whether steps are sized by what clients may wait (`scheduling/step_budget.py`)."""
        return bool(self.slo_tpot_ms or self.slo_itl_ms)

    @property
    def most_captured_rows(self) -> int:
        """Of captured steps with drafts, which are of decodes alone: at most as many drafts as sequences may run."""
        return self.max_num_seqs + min(self.max_graph_batch, self.max_num_seqs)

    def depth_on(self, device: str) -> int:
        """How many steps may be under way at once on this device ("cpu", "cuda:0", ...)."""
        overlap = device != "cpu" if self.async_scheduling == "auto" else self.async_scheduling == "on"
        return 2 if overlap else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """How KV moves between nodes."""

    connector: str = setting(
        "nixl", "nixl; lmcache or mooncake (nixl and a pool); loopback, none, or package.module:Class."
    )
    pool_url: str = setting("", "Server of the pool, for example lm://10.0.0.9:6500. Default: the connector's own.")
    pool_segment_gb: float = setting(1.0, "Memory that this node lends to the pool (mooncake).")
    pool_deadline_s: float = setting(5.0, "Seconds that a search of the pool may cost a request.")
    pool_handoff: str = setting("nixl", "Connector that hands requests over beside a pool.", hidden=True)
    advertise_host: str = setting(
        "127.0.0.1", "Address under which other nodes reach this one.", env="PD_ADVERTISE_HOST"
    )
    control_port: int = setting(0, "Port for handoff control messages. 0: chosen by the OS.", most=MAX_PORT)
    max_readers: int = setting(
        1024, "Connections to the control port at once: one for each node that reads from here.", least=1, hidden=True
    )
    kv_ports: str = setting(
        "",
        "Ports on which UCX listens for KV, LOW-HIGH: one for each rank of this host. Default: 45000-45099; on "
        "loopback the OS chooses. $UCX_NET_DEVICES and $UCX_TCP_PORT_RANGE win.",
    )
    lease_ttl_s: float = setting(10.0, "Seconds until P frees a lease that is not renewed.", positive=True, hidden=True)
    load_deadline_s: float = setting(30.0, "Seconds D waits for a request's KV before it falls back.", positive=True)
    read_deadline_s: float = setting(
        10.0, "Seconds without any progress of a node's reads until a load fails.", positive=True, hidden=True
    )
    on_load_failure: str = setting(
        "any", "When a load fails, D may prefill on another node, then locally (any); only one of these; or fail.",
        choices=("any", "remote", "local", "fail"),
    )  # fmt: skip
    max_node_deaths: int = setting(
        2, "A request during which so many prefill nodes died gets a final 500: it may be what kills them."
    )
    min_remote_tokens: int = setting(64, "D-first: prompts that lack less KV than this are prefilled on D.")
    cluster_key_file: str = setting(
        "", "File with the cluster's shared key. Default: $PD_CLUSTER_KEY, else one per user."
    )

    def __post_init__(self) -> None:
        _ = self.kv_port_range

    @property
    def kv_port_range(self) -> tuple[int, int] | None:
        """The lowest and the highest of `kv_ports`; None: the default. Raises StartupError."""
        if not self.kv_ports:
            return None
        low, dash, high = self.kv_ports.partition("-")
        if dash and low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high) < 65536:
            return int(low), int(high)
        raise StartupError(f"--kv-ports {self.kv_ports} is no range of ports: LOW-HIGH, for example 45000-45099")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The node's HTTP side."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(0, "HTTP port. 0: chosen by the OS and printed.", most=MAX_PORT)
    listen_fd: int = setting(-1, "Serve on the listening socket inherited under this number. -1: none.", hidden=True)
    role: str = setting(
        "mixed",
        "Policy, not capability: every engine can do both, and orders change it.",
        choices=("prefill", "decode", "mixed"),
    )
    node_id: str = setting("", "Name in headers, logs and tickets. Default: role-host-port.")
    metrics_names: str = setting(
        "pd",
        "Names at /metrics. vllm: beside ours, those of vLLM, such as vllm:num_requests_running.",
        choices=("pd", "vllm"),
    )
    tool_format: str = setting(
        "auto",
        "How the model writes tool calls and reasoning. auto: as its chat template or response template shows; none: "
        "chat answers are not parsed, and tools are refused.",
        choices=("auto", "none", *TOOL_FORMATS),
    )
    response_template: str = setting(
        "",
        "File with a response template of transformers (JSON) for chat answers. Default: the model's.",
    )
    output_parser: str = setting(
        "", "Parses chat answers instead: package.module:Class, which splits content, reasoning and tool calls."
    )
    profile_dir: str = setting(
        "", "Directory for the records of POST /start_profile. Default: the request is refused.", metavar="DIR"
    )
    start_deadline_s: float = setting(
        600.0, "Seconds until the engine must be ready (weights loaded, cache allocated).", positive=True
    )
    drain_s: float = setting(30.0, "Seconds a stopping node gives its running requests.")
    log_level: str = setting("info", "Log level.", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHttpLimits(HttpLimits):
    """As a router's, without a share for an address: a router is one, and may be a node's only client."""

    max_connections_per_address: int = setting(
        1_000_000, "Most open connections of one client address (IPv6: of one /64). 0: three quarters of all."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Everything one node needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    http: NodeHttpLimits = field(default_factory=NodeHttpLimits)

    @property
    def drafts(self) -> bool:
        """Whether the node may guess tokens. A stage of logits from outside draws one token of a sequence in a step."""
        return self.scheduler.speculation != "none" and not self.model.logits_stages

    @classmethod
    def sections(cls) -> dict[str, type]:
        """Section name -> its dataclass, for the command line."""
        return {f.name: f.default_factory for f in fields(cls)}  # type: ignore[misc]
