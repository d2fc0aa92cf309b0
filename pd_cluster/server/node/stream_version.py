"""The stream version: a digest of everything but the request that decides the bytes of an answer.

A node continues another node's stream only with an equal one. It covers more than the fingerprint, which covers the
weights and the KV: vocabulary, chat template, forms of answers, sampling defaults, and this package's release.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pd_cluster import __version__
from pd_http.frames import FRAMES_VERSION

if TYPE_CHECKING:
    from pd_cluster.config import NodeConfig
    from pd_cluster.server.params.sampling import SamplingDefaults
    from pd_cluster.server.text.tokenizer import Tokenizer
    from pd_cluster.server.tools.tool_format import ToolFormat


def settings_digest(
    config: NodeConfig,
    model_name: str,
    tokenizer: Tokenizer,
    defaults: SamplingDefaults,
    tool_format: ToolFormat | None,
) -> bytes:
    """A digest of what is known before the engine is ready: 16 bytes. Reads the files that the settings name.

    The tokenizer counts by what its ids mean. How it splits a text is compared for each prompt, by the prompt's digest.
    """
    directory, template = Path(config.model.model), config.server.response_template
    parts = (
        (__version__, FRAMES_VERSION, model_name),
        (config.server.output_parser, Path(template).read_bytes() if template else None, tokenizer.response_template),
        (config.server.tool_format, None if tool_format is None else tool_format.name),
        (tokenizer.chat_template.texts, tokenizer.vocabulary_digest()),
        defaults,
        config.model.logits_stages,
        [
            _content(directory / name) for name in ("config.json", "generation_config.json")
        ],  # the ids that end an answer
    )
    encoded = msgspec.msgpack.encode(parts, order="sorted")
    return blake2b(encoded, digest_size=16, person=b"pd-stream").digest()


def stream_version(settings: bytes, fingerprint: str, max_model_len: int) -> str:
    """The version as /health and heads of streams tell it. The context's length ends an answer without a limit."""
    text = f"{settings.hex()}/{fingerprint}/{max_model_len}"
    return blake2b(text.encode(), digest_size=16, person=b"pd-stream").hexdigest()


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""
