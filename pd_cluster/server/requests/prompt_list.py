"""One prompt or several in a field of a body: as text or as token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.errors import InvalidRequest
from pd_cluster.server.bodies.schema import decode_value
from pd_cluster.server.params.sampling import check_num_tokens, last_tokens

if TYPE_CHECKING:
    from pd_cluster.server.bodies.schema import PromptFields

Prompt = str | list[int]


def prompt_list(
    raw: bytes, name: str, body: PromptFields, *, most: int, vocab_size: int, max_model_len: int
) -> list[Prompt]:
    """The prompts in the field `name`, at least one and at most `most`. Raises InvalidRequest."""
    raw = raw.lstrip()
    inside = raw[1:].lstrip()
    prompts: list[Prompt]
    if raw.startswith(b'"'):
        prompts = [decode_value(raw, str, name)]
    elif not raw.startswith(b"["):
        raise InvalidRequest(
            f"{name} must be a string, an array of strings, an array of token ids, or an array of those", name
        )
    elif inside.startswith(b'"'):
        prompts = decode_value(raw, list[str], name)
    elif inside.startswith(b"["):
        prompts = decode_value(raw, list[list[int]], name)
    else:
        prompts = [decode_value(raw, list[int], name)]
    if len(prompts) > most:
        raise InvalidRequest(f"{name} has {len(prompts)} entries; {most} are allowed", name)
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest(f"{name} must not be empty", name)
        if isinstance(prompt, str):
            continue
        check_num_tokens(len(last_tokens(prompt, body)), max_model_len, name)  # first: min and max read every id
        if not (min(prompt) >= 0 and max(prompt) < vocab_size):
            raise InvalidRequest(f"{name} has token ids outside the vocabulary 0..{vocab_size - 1}", name)
    return prompts
