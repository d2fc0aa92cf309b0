"""Every setting of the router, declared once. The flags are made from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from yarl import URL

from pd_http.errors import StartupError
from pd_http.limits import HttpLimits
from pd_http.settings import MAX_PORT, setting


class HandoffOrder(StrEnum):
    """Which node is called first. The value is the one of the header `x-pd-route`."""

    P_FIRST = "p-first"  # router -> P for a ticket, then D with it
    D_FIRST = "d-first"  # router -> D with the addresses of Ps that it may ask
    DIRECT = "direct"  # one node prefills and decodes; clients cannot ask for it
    PROMPT = "prompt"  # one node reads the prompt, and nothing is generated; the request itself decides it


P_FIRST, D_FIRST, DIRECT, PROMPT = HandoffOrder  # each look-up of an enum's member takes 40 ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(HttpLimits):
    """The settings of one router process. Times are in seconds."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "HTTP port. 0: chosen by the OS and printed.", most=MAX_PORT)
    listen_fd: int = setting(
        -1,
        "Serve on the listening socket inherited as this file descriptor, instead of --host and --port. -1: none.",
        hidden=True,
    )
    workers: int = setting(
        1,
        "Processes that serve the port. Each follows all nodes by itself; orders reach all of them, and one that dies "
        "is replaced.",
        least=1, most=64,
    )  # fmt: skip
    prefill: tuple[str, ...] = setting((), "Base URLs of prefill nodes.", metavar="URL")
    decode: tuple[str, ...] = setting((), "Base URLs of decode nodes.", metavar="URL")
    mixed: tuple[str, ...] = setting(
        (), "Base URLs of mixed nodes: they decode, and prefill for themselves.", metavar="URL"
    )
    nodes_file: str = setting(
        "", 'JSON file with more nodes, [{"url": ..., "role": "prefill"|"decode"|"mixed"}]; its changes are followed.'
    )
    kubernetes_namespace: str = setting("", "Find nodes among the pods of this namespace, and follow its changes.")
    kubernetes_selector: str = setting("pd-cluster/part=node", "Labels of those pods: KEY=VALUE,...")
    start_empty: bool = setting(False, "Start without nodes: they are added later by POST /nodes.")
    route: str = setting(
        "p-first",
        "Which node is called first, unless a request says otherwise (x-pd-route).",
        choices=("p-first", "d-first"),
    )
    cluster_key_file: str = setting(
        "", "File with the cluster's shared key. Default: $PD_CLUSTER_KEY, else one per user."
    )
    on_prefill_failure: str = setting(
        "local", "If no prefill node answers: let the decode node prefill, or fail.", choices=("local", "fail")
    )
    prefill_on_decode: str = setting(
        "auto",
        "auto: while prefill nodes queue, a decode node prefills a prompt that it would answer clearly sooner, unless "
        "local prefill is not allowed (--on-prefill-failure) or the request asks for an order.",
        choices=("auto", "never"),
    )
    decode_on_prefill: str = setting(
        "auto",
        "auto: while the decode nodes would miss the nodes' --slo-tpot-ms with one more stream, a prefill node that "
        "has time for it keeps the stream of a prompt, else one with fewer sequences than any decode node; without "
        "a target one with time to spare, where the stream is sooner and costs less. Not if the request asks for an "
        "order. And while no decode node answers, prefill nodes serve requests alone, whatever they ask for.",
        choices=("auto", "never"),
    )
    slo_ttft_ms: float = setting(
        0.0,
        "Target for the first token of a stream. A decode node prefills a prompt that the prefill nodes would answer "
        "later and it would not. 0: none.",
    )
    slo_tpot_ms: float = setting(
        0.0, "Target of a stream's time per output token; with slo_ttft_ms it decides what counts as goodput. 0: none."
    )
    request_log: str = setting(
        "slow",
        "Write one JSON line per request, without any text of it, to standard error. errors: requests that the cluster "
        "failed; slow: also those beyond --slow-ttft-ms; all: every request.",
        choices=("off", "errors", "slow", "all"),
    )
    slow_ttft_ms: float = setting(
        5000.0, "A request with a later first token is slow: it is logged and traced.", positive=True
    )
    otlp_url: str = setting(
        "",
        "OpenTelemetry collector that gets a trace of sampled, slow and failed requests, by OTLP over HTTP: "
        "http://HOST:4318. Needs the extra otel.",
        metavar="URL",
    )
    trace_ratio: float = setting(
        0.01, "Share of the requests that is traced, beside those that a client samples.", most=1
    )
    api_keys: str = setting(
        "",
        "File with the API keys of clients, a line of JSON each (docs/security.md); its changes are followed. Without "
        "one, every client may use the router.",
        metavar="FILE",
    )
    max_queue: int = setting(
        256,
        "With --api-keys: requests that wait at the router, in turns of the keys, while all nodes are full or their "
        "key has as many under way as it may.",
    )
    max_queue_mb: float = setting(
        48.0,
        "Memory in MB of the bodies of all requests that wait so, at most a quarter of --max-held-mb; beyond it those "
        "served last are refused with 429. At least one body of --max-body-mb may wait.",
        positive=True,
    )
    max_queue_s: float = setting(30.0, "How long such a request waits before it is refused with 429.", positive=True)
    slo_slack: float = setting(
        0.0,
        "With --api-keys and --slo-ttft-ms: a request is refused with 429 at once if its first token is expected later "
        "than this many times the target. 0: none is.",
    )
    max_prefill_tries: int = setting(0, "Prefill nodes tried for one request. 0: all healthy ones.", hidden=True)
    max_decode_tries: int = setting(0, "Decode nodes tried before the first byte. 0: all healthy ones.", hidden=True)
    max_node_deaths: int = setting(
        2, "A request gets a final 500 when so many nodes died while they served it: it may be the cause.", least=1
    )
    offer_size: int = setting(3, "Prefill nodes named to a decode node, best first.", least=1, hidden=True)
    offer_ttl_s: float = setting(120.0, "How long a decode node may act on such a list.", most=43_200, hidden=True)
    connect_timeout_s: float = setting(3.0, "Deadline for a TCP connection to a node.", hidden=True)
    ticket_timeout_s: float = setting(30.0, "Deadline for a prefill node to admit a prompt.", hidden=True)
    first_byte_timeout_s: float = setting(120.0, "Deadline for a stream's first byte: queueing, prefill, transfer.")
    response_timeout_s: float = setting(600.0, "Deadline for an unstreamed answer to begin: the whole generation.")
    idle_timeout_s: float = setting(
        120.0, "Longest time without progress within an answer, on the node's or the client's side."
    )
    continue_wait_s: float = setting(
        10.0, "How long a stream that lost its decode node waits for a node that can continue it, while there is none."
    )
    control_timeout_s: float = setting(15.0, "Deadline for small calls: models, tokenize, release.", hidden=True)
    keepalive_s: float = setting(
        4.0, "Idle connections to nodes are closed after this; keep it below the nodes' own limit.", hidden=True
    )
    health_interval_s: float = setting(0.5, "Time between two checks of a node's /health.")
    health_timeout_s: float = setting(2.5, "A node that does not answer /health within this time is judged frozen.")
    probe_timeout_s: float = setting(
        1.0, "A node that broke a connection and does not answer /health within this time is judged dead.", hidden=True
    )
    eject_after: int = setting(
        3, "Failures in a row after which a node gets no requests for eject_s, whatever /health says.",
        least=1, hidden=True,
    )  # fmt: skip
    eject_s: float = setting(5.0, "How long an ejected node gets no requests.", hidden=True)
    max_body_mb: float = setting(48.0, "Largest request body in MB.")
    write_timeout_s: float = setting(
        20.0,
        "Seconds that a full send buffer (64 KiB) may wait for the client to read 48 KiB of it. Keep it to a third of "
        "the nodes' setting; otherwise nodes mistake a slow client for a hanging router.",
    )
    drain_s: float = setting(30.0, "Time that a stopping router gives its running requests.")
    linger_s: float = setting(
        6.0,
        "Of that time: how long it accepts connections, and keeps those open on which no request comes; less where no "
        "connection is open. Its answers ask clients to close theirs.",
    )
    admin_endpoints: str = setting(
        "signed",
        "POST /reset_prefix_cache, /flush_cache, /start_profile and /stop_profile, which go to all nodes. signed: with "
        "an order that the cluster's key has signed; open: for every client, as benchmark tools expect.",
        choices=("signed", "open"),
    )
    dashboard: str = setting(
        "local",
        "GET /dashboard, a page with nodes, handoffs and recent requests (no text of them). local: for this machine, "
        "so also through ssh -L and kubectl port-forward; open: for every client; off: not served.",
        choices=("local", "open", "off"),
    )
    log_level: str = setting("info", "Log level.", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        if not (self.decode or self.mixed or self.learns_of_nodes):
            raise StartupError(
                "no node can decode: give at least one --decode URL or --mixed URL, or a source of nodes "
                "(--nodes-file, --kubernetes-namespace, --start-empty)"
            )
        HttpLimits.__post_init__(self)
        urls = [*self.prefill, *self.decode, *self.mixed]
        for url in urls:
            check_node_url(url)
        if self.otlp_url:
            check_node_url(self.otlp_url, "collector")
        if len({url.rstrip("/") for url in urls}) < len(urls):
            raise StartupError("a node is given twice: each URL has one role (--prefill, --decode or --mixed)")
        if not all(key and value for key, value in self.kubernetes_labels.items()):
            raise StartupError(f"bad --kubernetes-selector {self.kubernetes_selector!r}: write KEY=VALUE,KEY=VALUE")

    @property
    def learns_of_nodes(self) -> bool:
        """Whether nodes may be added that no flag names."""
        return bool(self.nodes_file or self.kubernetes_namespace or self.start_empty)

    @property
    def kubernetes_labels(self) -> dict[str, str]:
        pairs = (pair.partition("=") for pair in self.kubernetes_selector.split(","))
        return {key.strip(): value.strip() for key, _, value in pairs}

    @property
    def default_order(self) -> HandoffOrder:
        return HandoffOrder(self.route)

    @property
    def spills(self) -> bool:
        """Whether a decode node may prefill prompts while there are prefill nodes."""
        return self.prefill_on_decode == "auto" and self.on_prefill_failure == "local"

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 1e6)

    @property
    def max_queue_bytes(self) -> int:
        """Half of what is held of bodies is left to those that do not wait: else one key's would refuse all others."""
        return max(min(int(self.max_queue_mb * 1e6), self.max_held_bytes // 4), self.max_body_bytes)


def check_node_url(url: str, kind: str = "node") -> None:
    """Raises StartupError unless `url` is `http(s)://host[:port]`, optionally with a path prefix."""
    try:
        parts = urlsplit(url)
        port = parts.port
        URL(url)  # stricter, and used for the requests
        (parts.hostname or "").encode("idna")  # as a resolver does: no label is empty or too long
    except ValueError as error:
        raise StartupError(f"bad {kind} URL {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise StartupError(f"bad {kind} URL {url!r}: write it as http://host:port")
    if parts.query or parts.fragment or parts.username:
        raise StartupError(f"bad {kind} URL {url!r}: no user, query or fragment, only http://host:port")
