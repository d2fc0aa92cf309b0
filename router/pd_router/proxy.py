"""The ASGI endpoint of the generating calls: reads, plans and runs a request, and counts exactly one outcome."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING

from pd_http.body import ClientGone, read_body
from pd_http.errors import PdError
from pd_http.reply import DisconnectWatch
from pd_router import headers as rules
from pd_router.body import RequestBody
from pd_router.policy import make_plan
from pd_router.reply import RouterReply
from pd_router.routed_request import RoutedRequest, Services

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

log = logging.getLogger("pd_router")


class Proxy:
    """Serves `POST /v1/chat/completions` and `POST /v1/completions`."""

    def __init__(self, services: Services) -> None:
        self._s = services
        self._turns = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        s = self._s
        arrived_at = s.table.clock()
        given = rules.first_values(scope["headers"])
        request_id = rules.request_id(given)
        reply = RouterReply(send, request_id)
        order, reason, outcome = "none", "none", "ok"
        exchange: RoutedRequest | None = None
        try:
            with s.metrics.in_flight.track_inprogress():
                asked = rules.asked_order(given)
                body = RequestBody(await read_body(scope, receive, s.longest_body))
                plan = make_plan(
                    s.table, body.model, s.config.default_order, asked, next(self._turns),
                    several_prompts=body.has_several_prompts,
                )  # fmt: skip
                headers = rules.forwarded(scope["headers"], request_id)
                exchange = RoutedRequest(s, scope["path"], body, headers, plan, reply, arrived_at)
                with DisconnectWatch(receive, reply):
                    await exchange.run()
        except ClientGone:
            outcome = "client_gone"
            s.metrics.client_gone.labels(exchange.phase if exchange is not None else "request").inc()
        except PdError as error:
            outcome = "refused" if error.status < 500 else "failed"
            await reply.fail(error)
        except asyncio.CancelledError:  # by the server, at the end of drain_s; the watch turns its own into ClientGone
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
            if exchange is not None:
                order, reason = exchange.plan.order.value, exchange.plan.reason
                s.metrics.request_s.labels(order).observe(s.table.clock() - arrived_at)
            s.metrics.requests.labels(order, reason, outcome).inc()
