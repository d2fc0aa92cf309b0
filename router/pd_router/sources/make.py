"""The node sources that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_http.errors import StartupError
from pd_router.sources.file import NodesFile

if TYPE_CHECKING:
    from pd_router.config import RouterConfig
    from pd_router.sources.base import NodeSource


def make_sources(config: RouterConfig) -> tuple[NodeSource, ...]:
    """The node sources in addition to flags and posted orders.

    Raises StartupError if a source is faulty now; later faults are waited for.
    """
    sources: list[NodeSource] = []
    if config.nodes_file:
        file = NodesFile(config.nodes_file)
        try:
            file.read()
        except ValueError as error:
            raise StartupError(f"--nodes-file {config.nodes_file}: {error}") from error
        sources.append(file)
    if config.kubernetes_namespace:
        sources.append(_kubernetes(config))
    return tuple(sources)


def _kubernetes(config: RouterConfig) -> NodeSource:
    try:
        from pd_router.sources.kubernetes import KubernetesPods, config_from_environment
    except ImportError as error:
        raise StartupError(
            f"--kubernetes-namespace needs the package lightkube ({error}): pip install 'pd-cluster[kubernetes]'"
        ) from error
    return KubernetesPods(config.kubernetes_namespace, config.kubernetes_labels, config_from_environment())
