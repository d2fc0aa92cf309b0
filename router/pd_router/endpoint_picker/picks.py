"""Which nodes a gateway sends a request to, what it tells them, and what the request occupies meanwhile.

D-first is the only order with a handoff: a gateway sends a request to one node. That node gets the signed offer in a
header, and asks a prefill node by itself.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pd_connectors.protocol.feed import CHARGE_HEADER, PREFILL_CHARGE_HEADER
from pd_connectors.protocol.text_chain import chain_key
from pd_connectors.protocol.ticket import OFFER_HEADER
from pd_http.errors import InvalidRequest
from pd_http.names import CLIENT_HEADER, client_name, is_name
from pd_router.calls.headers import ROUTE, asked_order
from pd_router.config import HandoffOrder
from pd_router.errors import NoNode
from pd_router.policy.candidates import to_generate
from pd_router.policy.charge import charge_for
from pd_router.policy.prompt_facts import PromptFacts, prompt_facts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pd_router.calls.body import RequestBody
    from pd_router.nodes.node import Node
    from pd_router.policy.charge import Charge
    from pd_router.policy.route import Route
    from pd_router.requests.services import Services

_NO_PROMPT = PromptFacts(0)


@dataclass(frozen=True, slots=True)
class Pick:
    """The choice for one request. `close` it when the request has ended; `answered` when its answer has begun."""

    route: Route
    nodes: tuple[Node, ...]  # the one to send it to, then those for retries; never empty
    headers: Mapping[str, str]  # for the node
    decode_charge: Charge | None = None
    prefill_charge: Charge | None = None
    prefill_node: Node | None = None  # that the decode node asks first
    shows_reading: bool = False  # the answer begins when the prompt has been read
    predicted_s: float | None = None  # until the first token; None: not known

    @property
    def destination(self) -> str:
        """As the endpoint picker protocol writes it: IP:PORT,IP:PORT,..."""
        return ",".join(address for node in self.nodes if (address := address_of(node)) is not None)

    def answered(self, prefilled_by: str, served_by: str) -> None:
        """Note that the answer has begun. `prefilled_by`, `served_by`: node ids, or "" if the answer names none.

        If the gateway moved on to another node, the first one has no part in the request.
        """
        first = self.nodes[0]
        if self.decode_charge is not None:
            if served_by not in ("", first.node_id, address_of(first)):
                self.decode_charge.release()
            elif self.shows_reading:
                self.decode_charge.prefill_done()
            else:
                self.decode_charge.prefill_over()
        if self.prefill_charge is not None:
            if self.shows_reading and self.prefill_node is not None and prefilled_by == self.prefill_node.node_id:
                self.prefill_charge.prefill_done()
            self.prefill_charge.release()

    def close(self) -> None:
        """Idempotent."""
        for charge in (self.decode_charge, self.prefill_charge):
            if charge is not None:
                charge.release()


class EndpointPicker:
    """Chooses as the router does, with the router's table. `fallbacks`: nodes named after the first."""

    def __init__(self, services: Services, fallbacks: int) -> None:
        self._s = services
        self._settings = replace(services.config, route=HandoffOrder.D_FIRST.value, decode_on_prefill="never")
        self._most_nodes = 1 + fallbacks
        self._turns = itertools.count()
        self._chain_key = chain_key(services.key)

    def any_node(self, subset: Collection[str] | None) -> Pick:
        """For a call without a prompt. `subset`: the addresses to choose among; None: all. Raises NoNode."""
        route, nodes = self._nodes(self._choose(None, _NO_PROMPT, None).direct("no-prompt"), subset)
        return Pick(route, nodes, {})

    def pick(self, path: str, body: RequestBody, headers: Mapping[str, str], subset: Collection[str] | None) -> Pick:
        """`headers`: of the client. Raises InvalidRequest, ModelNotFound, NoNode."""
        asked = asked_order(headers)
        if asked is HandoffOrder.P_FIRST:
            raise InvalidRequest("p-first is an order of the router: a gateway sends a request to one node", ROUTE)
        s = self._s
        route = self._choose(body.model, prompt_facts(body, s.table, self._chain_key), asked)
        if body.reads_only(path):
            route = route.direct("prompts-only")
        route, nodes = self._nodes(route, subset)
        offered = route.offered(s.table.clock(), s.config.offer_size) if route.order is HandoffOrder.D_FIRST else []
        clock, shows_reading = s.table.clock, body.shows_reading
        predicted_s = route.predicted_s(nodes[0], clock())  # before the charges, which are of this prompt
        decode_charge = charge_for(
            route, nodes[0], clock, reads=not offered, generates=True, shows_reading=shows_reading
        )
        reported = {CHARGE_HEADER: decode_charge.name}
        # Gateways write the client's address after what it sent. Without that the last one is what it sent
        if is_name(address := headers.get("x-forwarded-for", "").rpartition(",")[2].strip()):
            reported[CLIENT_HEADER] = client_name("", address)
        if not offered:
            return Pick(
                route, nodes, reported, decode_charge, shows_reading=shows_reading, predicted_s=predicted_s
            )  # fmt: skip
        prefill_charge = charge_for(route, offered[0], clock, reads=True, generates=False, shows_reading=shows_reading)
        reported |= {OFFER_HEADER: s.signed_offer(offered), PREFILL_CHARGE_HEADER: prefill_charge.name}
        return Pick(route, nodes, reported, decode_charge, prefill_charge, offered[0], shows_reading, predicted_s)

    def _choose(self, model: str | None, prompt: PromptFacts, asked: HandoffOrder | None) -> Route:
        s = self._s
        candidates = to_generate(s.table, model, prompt, self._settings, next(self._turns), asked=asked)
        return s.policy.choose(prompt, candidates, s.table.clock())

    def _nodes(self, route: Route, subset: Collection[str] | None) -> tuple[Route, tuple[Node, ...]]:
        """The route that the nodes of `subset` can serve, and the best of them in their order. Raises NoNode."""
        now_s = self._s.table.clock()
        nodes = [node for node in route.decodes if _is_in(address_of(node), subset)]
        for way in filter(None, (route, route.otherwise, route.direct("no-pair"))):
            if (first := way.best(nodes, now_s)) is not None:
                break
        else:
            raise NoNode("no healthy node with an IP address among the gateway's endpoints can decode; try again later")
        route, ranked = way if way.otherwise is None else way.direct(way.reason), [first]
        while len(ranked) < self._most_nodes:
            node = route.best([node for node in nodes if node not in ranked], now_s)
            if node is None:
                break
            ranked.append(node)
        return route, tuple(ranked)


def address_of(node: Node) -> str | None:
    """IP:PORT of the node; None: its URL names no IP address, so no gateway can be sent there."""
    parts = urlsplit(node.url)
    try:
        address = ip_address(parts.hostname or "")
    except ValueError:
        return None
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def _is_in(address: str | None, subset: Collection[str] | None) -> bool:
    return address is not None and (subset is None or address in subset)


def subset_of(values: Sequence[object]) -> frozenset[str]:
    """The addresses of a subset hint: a list of IP:PORT, each of which may hold several after commas."""
    return frozenset(one.strip() for value in values if isinstance(value, str) for one in value.split(",") if one)
