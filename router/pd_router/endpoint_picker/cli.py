"""The command line of `pd-cluster epp`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pd_http.errors import StartupError
from pd_http.sockets import bound
from pd_router.cli import config_from
from pd_router.cli import run as run_router
from pd_router.endpoint_picker.config import PickerConfig

if TYPE_CHECKING:
    import argparse

    from pd_router.config import RouterConfig


def run(args: argparse.Namespace) -> int:
    """As `pd_router.cli.run`. SIGHUP drains and ends: a successor could not take over the gRPC port."""
    try:
        from pd_router.endpoint_picker.grpc_server import PickerServer

        _check(config_from(args, PickerConfig))
    except ImportError as error:
        sys.stderr.write(f"pd-cluster epp: {error}; pip install 'pd-cluster[gateway]'\n")
        return 2
    except (StartupError, OSError) as error:
        sys.stderr.write(f"pd-cluster epp: {error}\n")
        return 2
    return run_router(args, is_supervised=True, name="epp", kind=PickerConfig, ports=(PickerServer,))


def _check(config: RouterConfig) -> None:
    """Raises StartupError or OSError for what would else end the process when its gRPC port opens."""
    assert isinstance(config, PickerConfig)
    bound(config.host, config.grpc_port).close()
    for path in (config.grpc_tls_cert, config.grpc_tls_key):
        if path:
            Path(path).read_bytes()
