"""Every setting of the router, declared once. `cli.py` makes the flags from these fields."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from urllib.parse import urlsplit

from yarl import URL

from pd_http.errors import StartupError
from pd_http.limits import HttpLimits
from pd_http.settings import MAX_PORT, setting


class HandoffOrder(StrEnum):
    """Who is called first. The value is what `x-pd-route` carries."""

    P_FIRST = "p-first"  # router -> P for a ticket, then D with it
    D_FIRST = "d-first"  # router -> D with the names of Ps that it may ask
    DIRECT = "direct"  # one node does everything; never asked for, only fallen back to


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(HttpLimits):
    """What one router process needs. Times are in seconds."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "HTTP port. 0: chosen by the OS and printed.")
    listen_fd: int = setting(
        -1, "Serve on the listening socket inherited as this file descriptor; --host and --port are not used. -1: none."
    )
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
    start_empty: bool = setting(False, "Start without knowing a node: they come later, by POST /nodes.")
    route: str = setting(
        "p-first",
        "Which node is called first, unless a request says otherwise (x-pd-route).",
        choices=("p-first", "d-first"),
    )
    cluster_key_file: str = setting(
        "", "File with the cluster's shared key. Default: $PD_CLUSTER_KEY, else one per user."
    )
    on_prefill_failure: str = setting(
        "local", "When no prefill node answers: let the decode node prefill, or fail.", choices=("local", "fail")
    )
    prefill_on_decode: str = setting(
        "auto",
        "auto: while prefill nodes queue, a decode node reads a prompt that it would answer clearly sooner, unless "
        "local prefill is not allowed (--on-prefill-failure) or the request asks for an order.",
        choices=("auto", "never"),
    )
    max_prefill_tries: int = setting(0, "Prefill nodes tried for one request. 0: all that live.")
    max_decode_tries: int = setting(
        0, "Decode nodes tried for one request, while the client has seen no byte. 0: all that live."
    )
    max_node_deaths: int = setting(
        2, "A request during which so many nodes died gets a final 500: it may be what kills them."
    )
    offer_size: int = setting(3, "Prefill nodes named to a decode node, best first.")
    offer_ttl_s: float = setting(120.0, "How long a decode node may act on such a list.")
    connect_timeout_s: float = setting(3.0, "Until a TCP connection to a node stands.")
    ticket_timeout_s: float = setting(30.0, "Until a prefill node has admitted a prompt (first event of its answer).")
    first_byte_timeout_s: float = setting(120.0, "Until a streamed answer begins: queueing, prefill and transfer.")
    response_timeout_s: float = setting(600.0, "Until an unstreamed answer begins: the whole generation.")
    idle_timeout_s: float = setting(
        120.0, "Longest time without progress inside an answer, on the node's or the client's side."
    )
    control_timeout_s: float = setting(15.0, "For small calls to a node: models, tokenize, detokenize, release.")
    keepalive_s: float = setting(
        4.0, "Idle connections to nodes are dropped after this; keep it below the nodes' own limit."
    )
    health_interval_s: float = setting(0.5, "Between two looks at a node's /health.")
    health_timeout_s: float = setting(2.5, "A node that does not answer /health within this is frozen.")
    probe_timeout_s: float = setting(
        1.0, "A node whose connection broke, and that does not answer /health within this, has died."
    )
    eject_after: int = setting(
        3, "Failures in a row after which a node is left out for eject_s, whatever /health says."
    )
    eject_s: float = setting(5.0, "How long it is left out.")
    max_body_mb: float = setting(48.0, "Largest request body in MB.")
    write_timeout_s: float = setting(
        20.0,
        "Seconds that a full send buffer (64 KiB) may wait for the client to read 48 KiB of it. Keep it to a third of "
        "the nodes', which else take a slow client for a router that hangs.",
    )
    drain_s: float = setting(30.0, "What a stopping router gives its running requests.")
    log_level: str = setting("info", "Log level.", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        check_numbers(self)
        if not (self.decode or self.mixed or self.learns_of_nodes):
            raise StartupError(
                "no node can decode: give at least one --decode URL or --mixed URL, or say where nodes are found "
                "(--nodes-file, --kubernetes-namespace, --start-empty)"
            )
        HttpLimits.__post_init__(self)
        urls = [*self.prefill, *self.decode, *self.mixed]
        for url in urls:
            check_node_url(url)
        if len({url.rstrip("/") for url in urls}) < len(urls):
            raise StartupError("a node is given twice: each URL has one role (--prefill, --decode or --mixed)")
        if not all(key and value for key, value in self.kubernetes_labels.items()):
            raise StartupError(f"bad --kubernetes-selector {self.kubernetes_selector!r}: write KEY=VALUE,KEY=VALUE")
        for name, least in (
            ("max_prefill_tries", 0), ("max_decode_tries", 0), ("max_node_deaths", 1), ("offer_size", 1),
            ("eject_after", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise StartupError(f"--{name.replace('_', '-')} must be at least {least}")

    @property
    def learns_of_nodes(self) -> bool:
        """Whether nodes may come that no flag names."""
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
        """Whether a decode node may read prompts while there are prefill nodes."""
        return self.prefill_on_decode == "auto" and self.on_prefill_failure == "local"

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 1e6)


def check_numbers(config: RouterConfig) -> None:
    """Raises StartupError for a number that no router can work with, naming its flag."""
    for item in fields(config):
        value = getattr(config, item.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        flag = f"--{item.name.replace('_', '-')}"
        lowest = -1 if item.name == "listen_fd" else 0
        if isinstance(value, float) and not math.isfinite(value):
            raise StartupError(f"{flag} {value} is no number")
        if value < lowest:
            raise StartupError(f"{flag} {value} must be at least {lowest}")
        if value == 0 and item.name.endswith(("_timeout_s", "_interval_s")):
            raise StartupError(f"{flag} must be above 0")
        if item.name == "port" and value > MAX_PORT:
            raise StartupError(f"{flag} {value} is no port: write 0 to {MAX_PORT} (0: any free one)")


def check_node_url(url: str) -> None:
    """Raises StartupError unless `url` is `http(s)://host[:port]` with nothing behind it but a path prefix."""
    try:
        parts = urlsplit(url)
        port = parts.port
        URL(url)  # stricter, and what will be asked
        (parts.hostname or "").encode("idna")  # as a resolver will: no label empty or too long
    except ValueError as error:
        raise StartupError(f"bad node URL {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise StartupError(f"bad node URL {url!r}: write it as http://host:port")
    if parts.query or parts.fragment or parts.username:
        raise StartupError(f"bad node URL {url!r}: no user, query or fragment, only http://host:port")
