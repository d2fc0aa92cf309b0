"""What separates the KV of a request's prompts from that of other requests. The only reader of `cache_salt` here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_connectors.protocol.cache_space import cache_space

if TYPE_CHECKING:
    from pd_cluster.server.bodies.schema import PromptFields
    from pd_cluster.server.node.node_adapters import NodeAdapters


@dataclass(frozen=True, slots=True)
class PromptSpace:
    """Found once for a request, where its body is decoded: a name may mean another adapter a moment later."""

    salt: str = ""  # as the body has it; a leg to another node has it, too, and that node finds the adapter itself
    adapter: str = ""  # digest; "": the base model
    name: str = ""  # of the adapter, for answers and for a leg to another node

    @property
    def text(self) -> str:
        """See `cache_space`."""
        return cache_space(self.adapter, self.salt)


def space_of(adapters: NodeAdapters, body: PromptFields) -> PromptSpace:
    """The space of a body's prompts."""
    digest = adapters.digest_of(body.model)
    return PromptSpace(body.cache_salt or "", digest, body.model or "" if digest else "")
