"""What `forked` imports once. Nothing of it starts a thread."""

from contextlib import suppress

import torch  # noqa: F401

from pd_connectors.lmcache_server import import_lmcache
from pd_connectors.protocol.errors import ConnectorUnavailable
from tests.connectors import remote_node  # noqa: F401

with suppress(ConnectorUnavailable):
    import_lmcache()
