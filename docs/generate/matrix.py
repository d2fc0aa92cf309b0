"""The support matrix of `README.md`.

What is supported comes from the registries and from the fields of request bodies. What is planned is listed here, each
beside the condition under which the code has it: a list that has fallen behind the code is an error.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

from docs.generate.document import code, table
from pd_cluster.config import ModelConfig, NodeConfig, ServerConfig
from pd_cluster.errors import InvalidRequest
from pd_cluster.launch.up_flags import POOL_CONNECTORS
from pd_cluster.models.quantization import METHODS
from pd_cluster.models.registry import ARCHITECTURES
from pd_cluster.server.chat import check_tools
from pd_cluster.server.fields import REFUSED
from pd_cluster.server.grammar_source import SYNONYMS
from pd_cluster.server.openapi import OPERATIONS
from pd_cluster.server.schema import ChatBody, CompletionBody
from pd_connectors.registry import CONNECTORS, PACKAGES

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCUMENT = "README.md"
BODY_FIELDS = frozenset(ChatBody.__struct_fields__) | frozenset(CompletionBody.__struct_fields__)
SETTINGS = frozenset(item.name for kind in NodeConfig.sections().values() for item in fields(kind))
PATHS = frozenset(operation.path for operation in OPERATIONS)
MODEL_TITLES = {
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "Glm4MoeForCausalLM": "GLM-4.5",
    "MiniMaxM2ForCausalLM": "MiniMax-M2",
    "Qwen2MoeForCausalLM": "Qwen2-MoE",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
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
            Feature("completions", ("prompt", "add_special_tokens"), ("/v1/completions",)),
            Feature("streaming", ("stream", "stream_options")),
            Feature("`n`", ("n",)),
            Feature("logprobs", ("logprobs", "top_logprobs")),
            Feature("cache salt", ("cache_salt",)),
            Feature("models, tokenize, detokenize", ("model",), ("/v1/models", "/tokenize", "/detokenize")),
        ),
        (
            Feature("priorities (where nodes allow them)", ("priority",)),
            Feature("`best_of` (equal to `n`)", ("best_of",)),
        ),
        (
            Feature("logprobs of prompts", ("prompt_logprobs",)),
            Feature("embeddings", paths=("/v1/embeddings",)),
            Feature("Responses and Messages", paths=("/v1/responses", "/v1/messages")),
        ),
    ),
    Area(
        "sampling",
        (
            Feature("temperature, top-p, top-k, min-p", ("temperature", "top_p", "top_k", "min_p")),
            Feature("seeds", ("seed",)),
            Feature("penalties", ("repetition_penalty", "presence_penalty", "frequency_penalty")),
            Feature("`logit_bias`", ("logit_bias",)),
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
        (Feature("further changes of the logits (a class of your own)", ("logits_args",)),),
        (Feature("beam search", ("use_beam_search",)),),
    ),
)
NO_FEATURES = frozenset({"tools", "tool_choice", "kv_transfer_params"})
"""Body fields that are read to refuse most of their values, or that nodes send each other."""


class Row(NamedTuple):
    """Titles, by how far the code supports them."""

    area: str
    yes: list[str]
    partly: list[str]
    planned: list[str]


def rows() -> list[Row]:
    """The matrix. Raises ValueError when a list of this module contradicts the code."""
    return [_models(), _dtypes(), _gpus(), _parallelism(), _connectors(), *_areas(), _tools()]


def _models() -> Row:
    titles = {name: MODEL_TITLES.get(name, name.removesuffix("ForCausalLM")) for name in ARCHITECTURES}
    mixtures = [titles.pop(name) for name, architecture in ARCHITECTURES.items() if architecture.rules.experts]
    others = ["other decoders without state (by transformers' modules: right on CPUs, not tried on GPUs, not fast)"]
    return Row("models", [*titles.values(), f"mixtures of experts ({', '.join(mixtures)})"], others, [])


def _dtypes() -> Row:
    caches = [f"{name} KV cache" for name in _choices(ModelConfig, "kv_cache_dtype")]
    fp8 = f"fp8 weights ({', '.join(map(code, METHODS))}; in blocks no whole model has run on a GPU yet)"
    return Row("dtypes", [*_choices(ModelConfig, "dtype"), *caches], [fp8], [])


def _gpus() -> Row:
    devices = [DEVICE_TITLES[name] for name in _choices(ModelConfig, "device")]
    return Row("GPUs, CPUs", devices[::-1], ["other NVIDIA GPUs that Triton supports (not tried)"], [])


def _parallelism() -> Row:
    roles = ", ".join(_choices(ServerConfig, "role"))
    nodes = f"nodes of one GPU each, any number of each role ({roles})"
    planned = _planned({"tensor parallelism": "tp" in SETTINGS, "expert parallelism": "ep" in SETTINGS})
    return Row("parallelism", [nodes], [], planned)


def _connectors() -> Row:
    names = [
        code(name) + " (with a shared pool)" * (name in POOL_CONNECTORS) for name in CONNECTORS if name in PACKAGES
    ]
    return Row("connectors", [*names, "a class of your own"], [], [])


def _tools() -> Row:
    parsers = ["reasoning and tool calls in answers (a parser class of your own)"]
    return Row("tools", [], parsers, _planned({"`tools` in requests": _takes_tools()}))


def _areas() -> list[Row]:
    served = [feature for area in AREAS for feature in (*area.yes, *area.partly)]
    if missing := BODY_FIELDS - NO_FEATURES - {name for feature in served for name in feature.fields}:
        raise ValueError(f"body fields that belong to no feature of docs/generate/matrix.py: {sorted(missing)}")
    for feature in served:
        if not feature.is_served or REFUSED.keys() & set(feature.fields):
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


def _takes_tools() -> bool:
    try:
        check_tools(ChatBody(messages=[], tools=[{}]))
    except InvalidRequest:
        return False
    return True


def _planned(titles: Mapping[str, bool]) -> list[str]:
    """`titles`: title -> whether the code has it. Raises ValueError for a title that it has."""
    if done := [title for title, has in titles.items() if has]:
        raise ValueError(f"the code has {', '.join(done)}: correct docs/generate/matrix.py")
    return list(titles)


def matrix() -> str:
    """The matrix as a Markdown table."""
    return table(["", "yes", "partly", "planned"], [[row.area, *map(", ".join, row[1:])] for row in rows()])


PARTS = {"matrix": matrix}
