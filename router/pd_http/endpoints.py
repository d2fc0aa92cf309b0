"""Every endpoint of routers and nodes, declared once: their routes, documents and labels in metrics are made of it."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from pd_http.dialects import COUNT_TOKENS, MESSAGES, RESPONSES

FEED_PATH = "/pd/feed"
ROLE_PATH = "/pd/role"
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Kind(Enum):
    """What serves an endpoint."""

    GENERATE = auto()  # a node or two generate tokens, as the router plans
    READ = auto()  # one node reads the prompts; nothing is generated
    META = auto()  # any node answers for all
    ORDER = auto()  # each node obeys; the name is that of the order's action
    ADAPTER = auto()  # all nodes obey, or none
    OWN = auto()  # routers and nodes answer about themselves
    NODE = auto()  # nodes alone
    ROUTER = auto()  # routers alone


class Endpoint(NamedTuple):
    """A method of a path. `name`: what serves it, and its label in metrics; endpoints of one name are the same.

    `summary`: for documents, without its dot. `signed`: a request needs an order, signed with the cluster's key.
    """

    method: str
    path: str  # as Starlette routes it
    name: str
    kind: Kind
    summary: str
    signed: bool = False

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", "chat", Kind.GENERATE, "Answer a conversation"),
    Endpoint("POST", "/v1/completions", "completions", Kind.GENERATE, "Continue one prompt or several"),
    Endpoint("POST", MESSAGES, "messages", Kind.GENERATE, "Answer a conversation, as Anthropic does"),
    Endpoint("POST", COUNT_TOKENS, "count_tokens", Kind.META, "Tokens of such a conversation"),
    Endpoint("POST", RESPONSES, "responses", Kind.GENERATE, "Answer a conversation, in OpenAI's newer form"),
    Endpoint("POST", "/v1/embeddings", "embeddings", Kind.READ, "Vectors of texts"),
    Endpoint("POST", "/pooling", "pooling", Kind.READ, "The same vectors, in vLLM's form"),
    Endpoint("POST", "/v1/score", "score", Kind.READ, "Score pairs of texts"),
    Endpoint("POST", "/score", "score", Kind.READ, "Score pairs of texts"),
    Endpoint("POST", "/v1/rerank", "rerank", Kind.READ, "Order documents by a query"),
    Endpoint("POST", "/rerank", "rerank", Kind.READ, "Order documents by a query"),
    Endpoint("POST", "/v2/rerank", "rerank", Kind.READ, "Order documents by a query"),
    Endpoint("GET", "/v1/models", "models", Kind.META, "List the model and its adapters"),
    Endpoint("GET", "/v1/models/{name:path}", "model", Kind.META, "Describe the model"),
    Endpoint("POST", "/tokenize", "tokenize", Kind.META, "Token ids of a prompt or of messages"),
    Endpoint("POST", "/detokenize", "detokenize", Kind.META, "Text of token ids"),
    Endpoint("GET", "/tokenizer_info", "tokenizer_info", Kind.META, "Special tokens and chat template"),
    Endpoint("GET", "/health", "health", Kind.OWN, "State of the node; status 503 unless it is ok"),
    Endpoint("GET", "/ping", "health", Kind.OWN, "As /health"),
    Endpoint("POST", "/ping", "health", Kind.OWN, "As /health"),
    Endpoint("GET", "/health_generate", "health_generate", Kind.META, "As /health, after one token was generated"),
    Endpoint("GET", "/version", "version", Kind.OWN, "Version of this package"),
    Endpoint("GET", "/load", "load", Kind.OWN, "Requests under way"),
    Endpoint("GET", "/server_info", "server_info", Kind.META, "Settings and sizes of the node"),
    Endpoint("GET", "/get_server_info", "server_info", Kind.META, "As /server_info"),
    Endpoint("GET", "/get_model_info", "model_info", Kind.META, "The model, as SGLang describes it"),
    Endpoint("POST", "/reset_prefix_cache", "reset_cache", Kind.ORDER, "Forget unused cached prefixes", signed=True),
    Endpoint("POST", "/flush_cache", "reset_cache", Kind.ORDER, "As /reset_prefix_cache", signed=True),
    Endpoint("POST", "/start_profile", "start_profile", Kind.ORDER, "Record what the engine does", signed=True),
    Endpoint("POST", "/stop_profile", "stop_profile", Kind.ORDER, "Write that record to `--profile-dir`", signed=True),
    Endpoint("POST", LOAD_PATH, "load_adapter", Kind.ADAPTER, "Give an adapter a name", signed=True),
    Endpoint("POST", UNLOAD_PATH, "unload_adapter", Kind.ADAPTER, "Forget the name of an adapter", signed=True),
    Endpoint("GET", "/kv", "kv", Kind.NODE, "State of the KV cache"),
    Endpoint("GET", FEED_PATH, "feed", Kind.NODE, "Load and cached prefixes, as they change, for routers", signed=True),
    Endpoint("GET", "/metrics", "metrics", Kind.OWN, "Prometheus metrics"),
    Endpoint("POST", ROLE_PATH, "role", Kind.NODE, "Change the node's role", signed=True),
    Endpoint("POST", "/pd/release", "release", Kind.NODE, "Release the lease of a signed ticket"),
    Endpoint("GET", "/openapi.json", "openapi", Kind.META, "OpenAPI 3.1 of this list"),
    Endpoint("GET", "/nodes", "nodes", Kind.ROUTER, "The router's nodes, with their load, health and restarts"),
    Endpoint("POST", "/nodes", "add", Kind.ROUTER, "Add a node", signed=True),
    Endpoint("DELETE", "/nodes/{id}", "remove", Kind.ROUTER, "Remove a node that was added", signed=True),
    Endpoint("POST", "/nodes/{id}/drain", "drain", Kind.ROUTER, "Send a node no new requests", signed=True),
    Endpoint("DELETE", "/nodes/{id}/drain", "resume", Kind.ROUTER, "Send a drained node requests again", signed=True),
    Endpoint("POST", "/nodes/{id}/role", "order_role", Kind.ROUTER, "Change a node's role", signed=True),
    Endpoint("POST", "/balance", "balance", Kind.ROUTER, "Nodes and load, for what a balance has decided", signed=True),
    Endpoint("GET", "/dashboard", "dashboard", Kind.ROUTER, "A page with nodes, handoffs and requests (--dashboard)"),
    Endpoint("GET", "/dashboard/state", "dashboard_state", Kind.ROUTER, "What this page shows; its fields may change"),
)
NODE_ACTIONS = {one.path: one.name for one in ENDPOINTS if one.kind is Kind.ORDER}
"""Path at a node, and at a router that orders it of all its nodes -> action."""


def methods_of(endpoint: Endpoint) -> list[str]:
    """Of the endpoints of its name at its path, which are one route: a refusal of other methods names them all."""
    return [one.method for one in ENDPOINTS if (one.path, one.name) == (endpoint.path, endpoint.name)]


def paths_of(*kinds: Kind) -> tuple[str, ...]:
    """The paths of these kinds."""
    return tuple(one.path for one in ENDPOINTS if one.kind in kinds)
