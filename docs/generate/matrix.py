"""The support matrix of `README.md`.

What is supported comes from the registries and from the fields of request bodies. What is planned is listed here, each
beside the condition under which the code has it: a list that has fallen behind the code is an error.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

from docs.generate.clients import specs
from docs.generate.document import code, table
from pd_cluster.config import ModelConfig, NodeConfig, SchedulerConfig, ServerConfig
from pd_cluster.launch.up_flags import POOL_CONNECTORS
from pd_cluster.models.quantization import METHODS, Scales
from pd_cluster.models.registry import ARCHITECTURES
from pd_cluster.server.bodies.fields import REFUSED
from pd_cluster.server.bodies.schema import ChatBody, CompletionBody
from pd_cluster.server.grammar.grammar_source import SYNONYMS
from pd_cluster.server.tools.known_formats import FORMATS
from pd_connectors.registry import CONNECTORS, PACKAGES
from pd_http.endpoints import ENDPOINTS
from pd_router.config import RouterConfig
from pd_router.endpoint_picker.config import PickerConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCUMENT = "README.md"
BODY_FIELDS = frozenset(ChatBody.__struct_fields__) | frozenset(CompletionBody.__struct_fields__)
SETTINGS = frozenset(item.name for kind in NodeConfig.sections().values() for item in fields(kind))
PATHS = frozenset(one.path for one in ENDPOINTS)
MODEL_TITLES = {
    "DeepseekV2ForCausalLM": "DeepSeek-V2",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, R1, Moonlight and Kimi-K2",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "Glm4MoeForCausalLM": "GLM-4.5",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "GptOssForCausalLM": "gpt-oss",
    "MiniMaxM2ForCausalLM": "MiniMax-M2",
    "Mistral4ForCausalLM": "Mistral Small 4 (text)",
    "Qwen2MoeForCausalLM": "Qwen2-MoE",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "Qwen3NextForCausalLM": "Qwen3-Next",
    "Qwen3_5ForCausalLM": "Qwen3.5 to 3.8",
    "Qwen3_5MoeForCausalLM": "Qwen3.5 and 3.6 with experts",
}
"""Titles of architectures. Every other one is called by its name, without the suffix."""
DEVICE_TITLES = {"cuda": "NVIDIA Hopper (measured on H200)", "cpu": "CPUs"}


class Feature(NamedTuple):
    """A feature of the HTTP API: the body fields and the paths that it needs."""

    title: str
    fields: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    @property
    def is_served(self) -> bool:
        """Whether nodes have all of its paths and read all of its fields."""
        return PATHS.issuperset(self.paths) and BODY_FIELDS.issuperset(self.fields)


class Area(NamedTuple):
    """Features of the HTTP API, by how far nodes support them."""

    name: str
    yes: tuple[Feature, ...]
    partly: tuple[Feature, ...]
    planned: tuple[Feature, ...]


AREAS = (
    Area(
        "API",
        (
            Feature(
                "chat",
                ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
                ("/v1/chat/completions",),
            ),
            Feature("completions", ("prompt", "add_special_tokens", "truncate_prompt_tokens"), ("/v1/completions",)),
            Feature("streaming", ("stream", "stream_options")),
            Feature("`n`", ("n",)),
            Feature("logprobs", ("logprobs", "top_logprobs", "return_tokens_as_token_ids")),
            Feature("`echo`, with `logprobs` too; logprobs of prompts", ("echo", "prompt_logprobs")),
            Feature("token ids in answers", ("return_token_ids",)),
            Feature("`prediction`", ("prediction",)),
            Feature("cache salt", ("cache_salt",)),
            Feature(
                "models, tokenize, detokenize, facts of the tokenizer",
                ("model", "request_id", "rid"),
                ("/v1/models", "/tokenize", "/detokenize", "/tokenizer_info"),
            ),
            Feature(
                "Anthropic's Messages and OpenAI's Responses (without state)",
                paths=("/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
            ),
            Feature(
                "embeddings (last token), scores and reranks (causal rerankers)",
                paths=("/v1/embeddings", "/pooling", "/v1/score", "/v1/rerank", "/v2/rerank"),
            ),
            Feature("cache resets and profiles (signed orders)", paths=("/reset_prefix_cache", "/start_profile")),
        ),
        (
            Feature("priorities (where nodes allow them)", ("priority",)),
            Feature("`best_of` (equal to `n`, or of a beam search)", ("best_of",)),
        ),
        (),
    ),
    Area(
        "sampling",
        (
            Feature("temperature, top-p, top-k, min-p", ("temperature", "top_p", "top_k", "min_p")),
            Feature("seeds", ("seed",)),
            Feature("penalties", ("repetition_penalty", "presence_penalty", "frequency_penalty")),
            Feature("`logit_bias`", ("logit_bias",)),
            Feature("`allowed_token_ids`, `bad_words`", ("allowed_token_ids", "bad_words")),
            Feature("limits", ("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos")),
            Feature(
                "stop strings and tokens",
                ("stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
            ),
            Feature(
                "structured output (JSON schema, regex, choice, grammar)",
                ("response_format", "structured_outputs", *SYNONYMS),
            ),
        ),
        (
            Feature("further changes of the logits (a class of your own)", ("logits_args",)),
            Feature(
                "beam search (answers come whole, without structured output and penalties)",
                ("use_beam_search", "length_penalty", "early_stopping"),
            ),
        ),
        (),
    ),
    Area(
        "tools",
        (
            Feature(
                "tool calls, streamed in pieces, held to their schemas (`tool_choice`, `strict`), in the formats "
                + ", ".join(map(code, sorted(FORMATS))),
                ("tools", "tool_choice", "parallel_tool_calls"),
            ),
            Feature(
                "reasoning apart from the answer",
                ("reasoning_effort", "enable_thinking", "include_reasoning", "separate_reasoning"),
            ),
        ),
        (Feature("other formats (a response template, or a parser class of your own)", ("tools",)),),
        (Feature("a bound on reasoning", ("thinking_token_budget",)),),
    ),
)
NO_FEATURES = frozenset({"kv_transfer_params"})
"""Body fields that nodes send each other."""


class Row(NamedTuple):
    """Titles, by how far the code supports them."""

    area: str
    yes: list[str]
    partly: list[str]
    planned: list[str]


def rows() -> list[Row]:
    """The matrix. Raises ValueError when a list of this module contradicts the code."""
    seen = [_access(), _seeing(), _gateways(), _clients()]
    nodes = [_models(), _dtypes(), _gpus(), _parallelism(), _drafts(), _host_cache()]
    return [*nodes, _failures(), _connectors(), *seen, *_areas()]


def _models() -> Row:
    titles = {name: MODEL_TITLES.get(name, name.removesuffix("ForCausalLM")) for name in ARCHITECTURES}
    states = [titles.pop(name) for name, architecture in ARCHITECTURES.items() if architecture.rules.has_states]
    latents = [titles.pop(name) for name, architecture in ARCHITECTURES.items() if architecture.rules.latent]
    mixtures = [titles.pop(name) for name in [*titles] if ARCHITECTURES[name].rules.experts]
    others = [
        f"text models that keep states ({', '.join(states)}; "
        "tiny random ones compared on CPU, random weights timed on one H200)",
        f"models with latent attention ({', '.join(latents)}; tiny random ones compared on CPU, "
        "shapes of Moonlight and GLM-4.7-Flash timed on H200s)",
        "other decoders that keep no state but keys and values (by transformers' modules: correct, not fast; on a GPU "
        "only tiny models of six of them were compared)",
        "[adapters](docs/adapters.md) (LoRA) by the request's `model`, through both kinds of nodes (off by default; "
        "compared on CPU, steps and first tokens of one shape timed on one and two H200s)",
    ]
    if "lora_slots" not in SETTINGS:
        raise ValueError("nodes have no --lora-slots: correct docs/generate/matrix.py")
    return Row("models", [*titles.values(), f"mixtures of experts ({', '.join(mixtures)})"], others, [])


def _dtypes() -> Row:
    caches = [f"{name} KV cache" for name in _choices(ModelConfig, "kv_cache_dtype")]
    measured = "of Llama-70B's shape only decoding was measured, with random weights"
    fp8 = f"fp8 weights ({', '.join(code(name) for name in METHODS if name != Scales.MXFP4)}; {measured})"
    mxfp4 = f"experts of gpt-oss in 4 bits ({code(Scales.MXFP4)}; only random weights were measured)"
    return Row("dtypes", [*_choices(ModelConfig, "dtype"), *caches], [fp8, mxfp4], [])


def _gpus() -> Row:
    devices = [DEVICE_TITLES[name] for name in _choices(ModelConfig, "device")]
    return Row("GPUs, CPUs", devices[::-1], ["other NVIDIA GPUs that Triton supports (not tried)"], [])


def _parallelism() -> Row:
    roles = ", ".join(_choices(ServerConfig, "role"))
    nodes = f"nodes of one GPU each, any number of each role ({roles}), which orders change at run time"
    if "tp" not in SETTINGS:
        raise ValueError("nodes have no --tp: correct docs/generate/matrix.py")
    ranks = [
        "tensor parallelism over the GPUs of one host (`--tp`; run with 2 H200s)",
        "experts spread over the same ranks",
        "prefill and decode nodes of unequal size (`--prefill-tp`, `--decode-tp`)",
        "[how many of each](docs/planning.md) (`pd-cluster plan`; near measured rows of 8B, not all of a mixture's)",
        "roles that follow the load (`pd-cluster balance`, off by default; simulated, and run on CPUs)",
    ]
    planned = _planned({"pipeline parallelism": "pp" in SETTINGS, "nodes over several hosts": "num_hosts" in SETTINGS})
    return Row("parallelism", [nodes], ranks, planned)


def _drafts() -> Row:
    names = [code(f"--speculation {name}") for name in _choices(SchedulerConfig, "speculation") if name != "none"]
    texts = (
        "of prompt, output and `prediction`; answers stay the same (off by default; measured on H200s with recorded "
        "answers)"
    )
    return Row("[drafts](docs/drafts.md)", [], [f"{', '.join(names)}: {texts}"], [])


def _host_cache() -> Row:
    if "host_cache_gb" not in SETTINGS:
        raise ValueError("nodes have no --host-cache-gb: correct docs/generate/matrix.py")
    if "disk_cache_dir" not in SETTINGS:
        raise ValueError("nodes have no --disk-cache-dir: correct docs/generate/matrix.py")
    host = (
        "prefixes that leave the GPU go on in host memory, and routers know it (off by default; gains simulated, and "
        "one slice of a trace measured)"
    )
    disk = "those that leave host memory go on in files (nodes with `--tp 1`; not measured)"
    partly = [f"`--host-cache-gb`: {host}", f"`--disk-cache-dir`: {disk}"]
    return Row("[host cache](docs/host_cache.md)", [], partly, [])


def _failures() -> Row:

    survived = [
        "streams and requests continue when their node dies, hangs or drains",
        "a request that stops nodes ends at the second",
        "[a cut network](docs/routing.md#when-the-network-is-cut) between hosts (run between network namespaces)",
        "[bounds](docs/security.md#bounds) by members, memory, connections and time",
        "rolling change of weights or build (prefill and decode nodes pair by fingerprint)",
    ]
    return Row("failures", survived, [], [])


def _access() -> Row:
    routers = {item.name for item in fields(RouterConfig)}
    missing = {"api_keys", "tls_cert", "slo_slack"} - routers
    if missing:
        raise ValueError(f"the router has no {sorted(missing)}: correct docs/generate/matrix.py")
    yes = [
        "API keys with limits, fair turns, priorities and a cache salt each",
        "early 429 by the expected first token",
        "TLS by certificate files, at routers and nodes",
    ]
    return Row("access", yes, ["limits over several routers (each has its own)"], [])


def _connectors() -> Row:
    names = [
        code(name) + " (with a shared pool)" * (name in POOL_CONNECTORS) for name in CONNECTORS if name in PACKAGES
    ]
    return Row("connectors", [*names, "a class of your own"], [], [])


def _seeing() -> Row:
    names = [f"metrics also under {name}'s names" for name in _choices(ServerConfig, "metrics_names") if name != "pd"]
    lines = _choices(RouterConfig, "request_log")[1:]
    return Row(
        "operations",
        [
            f"a log line per request ({', '.join(lines)})",
            "OpenTelemetry traces",
            "Grafana dashboard",
            "alerts",
            "a page of the router (`/dashboard`)",
            *names,
        ],
        [],
        [],
    )


def _gateways() -> Row:
    if "fallbacks" not in {item.name for item in fields(PickerConfig)}:
        raise ValueError("there is no endpoint picker: correct docs/generate/matrix.py")
    pool = "InferencePool of Gateway API (`pd-cluster epp`; with Envoy, not yet in a Kubernetes cluster)"
    return Row("gateways", [], [pool], [])


def _clients() -> Row:
    """Of the page on clients."""
    ran = sorted(
        {spec["head"]["client"].split(",")[0] for spec in specs() if spec["head"]["tried"] == "ran"}, key=str.lower
    )
    others = {spec["head"]["client"].split(",")[0] for spec in specs()} - set(ran)
    bodies = f"{', '.join(sorted(others, key=str.lower))} (their requests are served; not run themselves)"
    return Row("[clients](docs/clients.md)", [*ran, "OpenAI's and Anthropic's SDKs"], [bodies], [])


def _areas() -> list[Row]:
    served = [feature for area in AREAS for feature in (*area.yes, *area.partly)]
    if missing := BODY_FIELDS - NO_FEATURES - {name for feature in served for name in feature.fields}:
        raise ValueError(f"body fields that belong to no feature of docs/generate/matrix.py: {sorted(missing)}")
    for feature in served:
        if not feature.is_served or (REFUSED.keys() - BODY_FIELDS) & set(feature.fields):
            raise ValueError(f"nodes do not serve {feature.title}: correct docs/generate/matrix.py")
    return [
        Row(
            area.name,
            [feature.title for feature in area.yes],
            [feature.title for feature in area.partly],
            _planned({feature.title: feature.is_served for feature in area.planned}),
        )
        for area in AREAS
    ]


def _choices(kind: type, name: str) -> list[str]:
    """The values that a setting allows, but for `auto`."""
    (item,) = (item for item in fields(kind) if item.name == name)
    return [value for value in item.metadata["choices"] if value != "auto"]


def _planned(titles: Mapping[str, bool]) -> list[str]:
    """`titles`: title -> whether the code has it. Raises ValueError for a title that it has."""
    if done := [title for title, has in titles.items() if has]:
        raise ValueError(f"the code has {', '.join(done)}: correct docs/generate/matrix.py")
    return list(titles)


def matrix() -> str:
    """The matrix as a Markdown table."""
    return table(["", "yes", "partly", "planned"], [[row.area, *map(", ".join, row[1:])] for row in rows()])


PARTS = {"matrix": matrix}
