"""How uvicorn serves an app within the bounds of `HttpLimits`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import uvicorn

from pd_http.files import raise_file_limit
from pd_http.protocol import BoundedProtocol
from pd_http.tls import CertificateWatch

if TYPE_CHECKING:
    from pd_http.limits import HttpLimits
    from pd_http.metrics import HttpMetrics


def server_config(
    app: Any,
    limits: HttpLimits,
    metrics: HttpMetrics,
    files_per_request: int,
    protocol: type[BoundedProtocol] = BoundedProtocol,
    **settings: Any,
) -> uvicorn.Config:
    """uvicorn's settings for a server of router or node. `protocol`: of its connections. `settings`: more of uvicorn's.

    TLS is the gate's: uvicorn would speak of a connection only when its handshake is over.

    Raises StartupError for a certificate that cannot be used. The server classes stay apart: the node's process
    handles signals itself, the router hands over on SIGHUP.
    """
    context = limits.server_context()
    watch = None if context is None else CertificateWatch(limits, context)
    gate = metrics.make_gate(limits, raise_file_limit(), files_per_request)
    return uvicorn.Config(
        app,
        http=gate.protocol_of(protocol) if context is None else gate.handshake_of(protocol, context),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(limits.client_keepalive_s)),
        callback_notify=None if watch is None else watch.look,
        timeout_notify=1,
        **settings,
    )
