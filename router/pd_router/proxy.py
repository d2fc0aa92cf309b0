"""The endpoint of the calls that compute: reads, plans and runs a request, and counts exactly one outcome."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING

from pd_connectors.protocol.text_chain import chain_key
from pd_http.body import ClientGone
from pd_http.dialects import dialect_of
from pd_http.errors import PdError
from pd_router import headers as rules
from pd_router.body import RequestBody
from pd_router.call_record import CallRecord
from pd_router.choice import choose
from pd_router.prompt_facts import prompt_facts
from pd_router.prompt_request import PromptRequest
from pd_router.prompt_route import choose_reader, reads_only
from pd_router.reply import CallReply
from pd_router.routed_request import RoutedRequest
from pd_router.trace_context import TRACEPARENT, begin_trace

if TYPE_CHECKING:
    from pd_router.client_call import ClientCall
    from pd_router.services import Services

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
        reply = CallReply(call, request_id)
        reply.dialect = dialect = dialect_of(call.path)
        record = CallRecord(call.path, request_id, arrived_at, s.wall_clock())
        if self._traces:
            record.trace = begin_trace(given.get(TRACEPARENT), s.config.trace_ratio)
        outcome = "ok"
        exchange: RoutedRequest | PromptRequest | None = None
        s.metrics.num_in_flight += 1
        try:
            asked = rules.asked_order(given)
            body = RequestBody(await call.read_body(s.longest_body), dialect)
            record.model, record.stream = s.table.known_name(body.model), body.wants_stream
            headers = rules.forwarded(call.headers, request_id)
            if self._traces:
                headers[TRACEPARENT] = record.trace.header
            facts, turn = prompt_facts(body, s.table, self._chain_key), next(self._turns)
            if reads_only(call.path, body):
                route = choose_reader(s.table, body.model, facts, s.config, turn)
                exchange = PromptRequest(s, call.path, body, headers, route, reply, record)
            else:
                plan = choose(s.table, body.model, facts, s.config, asked, turn)
                exchange = RoutedRequest(s, call.path, body, headers, plan, reply, record)
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
            if outcome == "client_gone":
                s.metrics.client_gone.labels(exchange.phase if exchange is not None else "request").inc()
            if exchange is not None:
                record.order, record.reason = exchange.plan.order.value, exchange.plan.reason
            record.key = call.key_name
            record.end(s.table.clock(), outcome, reply.status)
            s.sinks.take(record)
            s.recent.add(record)


def _uncancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
