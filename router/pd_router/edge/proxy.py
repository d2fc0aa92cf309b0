"""The endpoint of the calls that compute: reads, routes and runs a request, and counts exactly one outcome."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING

from pd_connectors.protocol.text_chain import chain_key
from pd_http.body import ClientGone
from pd_http.dialects import dialect_of
from pd_http.errors import PdError
from pd_http.held_bytes import Share
from pd_http.names import CLIENT_HEADER, client_name
from pd_http.unfinished_requests import SMALL_BYTES
from pd_router.admission.api_keys import KEY_HEADERS
from pd_router.calls import headers as rules
from pd_router.calls.body import RequestBody
from pd_router.calls.reply import CallReply
from pd_router.calls.trace_context import TRACEPARENT, begin_trace
from pd_router.policy.candidates import to_generate, to_read
from pd_router.policy.prompt_facts import prompt_facts
from pd_router.records.call_record import CallRecord
from pd_router.requests.routed_request import RoutedRequest

if TYPE_CHECKING:
    from pd_router.admission.key_admission import AdmittedRequest
    from pd_router.admission.key_limits import KeyLimits
    from pd_router.calls.client_call import ClientCall
    from pd_router.config import HandoffOrder
    from pd_router.policy.route import Route
    from pd_router.requests.services import Services

log = logging.getLogger("pd_router")


class Proxy:
    """Serves `POST` to PROXY_PATHS of `client_connection.py`."""

    def __init__(self, services: Services) -> None:
        self._s = services
        self._turns = itertools.count()
        self._traces = bool(services.config.otlp_url)
        self._chain_key = chain_key(services.key)

    async def serve(self, call: ClientCall) -> None:
        """Answer `call`. Runs in a task of its own, which is cancelled when the client leaves or the router stops."""
        s = self._s
        arrived_at = s.table.clock()
        given = rules.first_values(call.headers)
        request_id = rules.request_id(given)
        reply = CallReply(call, request_id, s.held)
        reply.dialect = dialect_of(call.path)
        record = CallRecord(call.path, request_id, arrived_at, s.wall_clock())
        s.recent.load.begin(record)
        if self._traces:
            record.trace = begin_trace(given.get(TRACEPARENT), s.config.trace_ratio)
        outcome = "ok"
        exchange: RoutedRequest | None = None
        admitted: AdmittedRequest | None = None
        s.metrics.num_in_flight += 1
        try:
            asked = rules.asked_order(given)
            user = self._user(call)
            body = await self._read(call, reply)
            record.model, record.stream = s.table.known_name(body.model), body.wants_stream
            if user is not None and s.admission is not None:
                s.admission.shape(user, body)
            route = self._choose(call.path, body, asked)
            if user is not None and s.admission is not None:
                admitted = await s.admission.enter(user, body, route)
                if admitted.queued_s:
                    record.until(s.table.clock(), "admission")
                    route = self._choose(call.path, body, asked)
            exchange = RoutedRequest(s, body, self._headers(call, record), route, reply, record)
            await exchange.run()
        except ClientGone:
            outcome = "client_gone"
        except PdError as error:
            outcome = "refused" if error.status < 500 else "failed"
            await reply.fail(error)
        except asyncio.CancelledError:
            if call.is_gone:
                outcome = "client_gone"
                _uncancel()
            else:  # by the server, at the end of drain_s
                outcome = "stopped"
                await reply.stopped()
        except Exception as error:
            outcome = "crashed"
            await reply.crashed(error)
        except BaseException:
            outcome = "crashed"
            raise
        else:
            outcome = exchange.outcome
        finally:
            s.metrics.num_in_flight -= 1
            if reply.body_share is not None:
                reply.body_share.close()
            if admitted is not None:
                admitted.end(None if exchange is None else exchange.used(), outcome)
            record.key = call.key_name
            self._note_end(record, exchange, outcome, reply.status)

    async def _read(self, call: ClientCall, reply: CallReply) -> RequestBody:
        """The body of the call, when its turn has come. `reply` holds its share of the memory."""
        s = self._s
        raw = await call.read_body(s.longest_body)
        if len(raw) > SMALL_BYTES:  # others are not counted, and wait for no turn
            reply.body_share = Share(s.held)
            reply.body_share.grow(len(raw))
            await s.turns.take(len(raw))
        body = RequestBody(raw, reply.dialect)
        if not body.has_chain:
            s.metrics.unchained.inc()
        return body

    def _headers(self, call: ClientCall, record: CallRecord) -> rules.Headers:
        """Those that go to nodes."""
        headers = rules.forwarded(call.headers, record.request_id)
        headers[CLIENT_HEADER] = client_name(call.key_name, call.host)
        if self._traces:
            headers[TRACEPARENT] = record.trace.header
        return headers

    def _note_end(self, record: CallRecord, exchange: RoutedRequest | None, outcome: str, status: int) -> None:
        """Count a request that has ended, and pass its record on. `exchange`: None if no node was asked."""
        s = self._s
        if outcome == "client_gone":
            s.metrics.client_gone.labels(exchange.phase if exchange is not None else "request").inc()
        if exchange is not None:
            record.order, record.reason = exchange.route.order.value, exchange.route.reason
        if record.report is not None:
            record.model = record.model or s.table.known_name(record.report.model)
        record.end(s.table.clock(), outcome, status)
        s.sinks.take(record)
        s.recent.add(record)

    def _user(self, call: ClientCall) -> KeyLimits | None:
        """The limits of the client's key, which leaves the call here. None: there are no keys. Raises KeyRefused."""
        if (admission := self._s.admission) is None:
            return None
        user = admission.find(call.headers)
        call.headers = [pair for pair in call.headers if pair[0] not in KEY_HEADERS]
        call.key_name = user.key.name
        return user

    def _choose(self, path: str, body: RequestBody, asked: HandoffOrder | None) -> Route:
        """Raises ModelNotFound, NoNode."""
        s, turn = self._s, next(self._turns)
        prompt = prompt_facts(body, s.table, self._chain_key)
        if body.reads_only(path):
            candidates = to_read(s.table, body.model, s.config, turn)
        else:
            candidates = to_generate(s.table, body.model, prompt, s.config, turn, asked=asked)
        return s.policy.choose(prompt, candidates, s.table.clock())


def _uncancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
