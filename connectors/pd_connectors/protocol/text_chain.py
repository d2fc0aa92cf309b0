"""Names of prompts for routers, which have the text of a request and no tokens: hashes of the text, chained by steps.

Router and node write the part of a client's body that decides its prompt in one *canonical text*, and hash it step by
step. Equal hashes mean equal text up to the end of that step. The hashes are keyed: without the cluster's key they tell
nothing about a prompt, and prompts with different salts have no hash in common.

The canonical text of a conversation, so that a longer one begins with the text of the shorter:

    chat     HEAD END, then for each message: KEYS END CONTENT END
    prompt   HEAD END KIND END, then its text in UTF-8, or its token ids of 4 bytes

Some chat templates write the last turn, which is the last question and what follows it, otherwise than they do when the
next question has come (`LastTurn`). For those one END more stands before the first message that is written otherwise: a
text with the turn as the last has no step in common with one in which another turn follows, from there on.

HEAD: the fields of `HEAD_FIELDS` as JSON. KEYS: a message without its content, as JSON: role, calls, reasoning. They
come before the content because a template may write them there. Fields and the keys of messages are sorted. Values
inside of them keep the order of their keys: templates print tools and calls as they came.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from struct import unpack
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pd_connectors.protocol.messages import mac

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Bytes of text a hash. 400 kB take 1.1 ms at 512, 1.6 ms at 256, 0.8 ms at 1024; 256 doubles the news of a node, too.
# A prompt is found short by 256 bytes in the mean, about 64 tokens.
STEP_BYTES = 512
# Contents at which a step ends, too. A template may write tools (10,000 tokens) after the system message: they are
# named where the first question begins, which may be shorter than a step.
MAX_STARTS = 8
# Fields that chat templates read, or that change what is rendered. Those that are null count as absent.
HEAD_FIELDS = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "enable_thinking",
    "reasoning_effort",
    "tools",
)
# Parts of a message's content that are text, and the member that holds it
TEXT_PARTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
# Members of a message that hold reasoning: clients and servers have several names for it
REASONING_MEMBERS = frozenset(("reasoning_content", "thinking", "reasoning", "thinking_blocks", "reasoning_details"))
END_OF_REASONING = "</think>"  # in a content: Qwen3's template and its like take what stands before it for reasoning
END = b"\xff"  # in no UTF-8 text, so that no part can be mistaken for another
TOKEN_BYTES = 4
# Of the fields of a prompt with a chain. The router makes chains on its event loop: 3 ms for 1 MB of text, and up to
# 80 for the smallest messages and tools
MAX_CHAIN_BYTES = 1 << 20
_SOURCES = (*HEAD_FIELDS, "messages", "prompt", "input", "system", "instructions")  # also those of other APIs


class LastTurn(msgspec.Struct, frozen=True, array_like=True):
    """What a chat template writes in the last turn alone, and no more when the next question has come."""

    tools: bool = False  # the tools, before the question
    system: bool = False  # the system message, before the question
    answers: bool = False  # something in each answer with calls: an empty reasoning, where there is none
    reasoning: bool = False  # the reasoning of answers with calls

    def begin(self, messages: Sequence[dict[str, Any]], *, has_tools: bool) -> int:
        """The number of the first message that is written otherwise, or before which something stands that is."""
        roles = [message.get("role") for message in messages]
        end = len(roles) - roles[::-1].index("user") if "user" in roles else 0
        if (self.tools and has_tools) or (self.system and begins_with_system(messages)):
            return next((i + 1 for i in reversed(range(end)) if roles[i] != "user"), 0)  # users in a row may be joined
        if self.answers:
            return end
        answers = (i for i in range(end, len(roles)) if roles[i] == "assistant" and self.reasoning)
        last = len(roles) - 1  # gets an empty one from some templates
        return next((i for i in answers if i == last or _may_reason(messages[i])), len(roles))


AS_ALWAYS = LastTurn()


class CanonicalText(NamedTuple):
    """The canonical text of a body, and where the clients' own text lies in it."""

    text: bytes
    starts: tuple[int, ...]  # of each message's content, or of the prompt, in bytes
    is_ids: bool = False  # the prompt is token ids


def begins_with_system(messages: Sequence[Mapping[str, Any]]) -> bool:
    return bool(messages) and messages[0].get("role") in ("system", "developer")


def chain_key(cluster_key: bytes) -> bytes:
    """The key of the cluster's text chains."""
    return mac(cluster_key, b"pd text chain")


def read_canonical(fields: Mapping[str, msgspec.Raw | bytes], last_turn: LastTurn = AS_ALWAYS) -> CanonicalText | None:
    """Of a body, of which `fields` are the fields as raw JSON.

    None for one without a chain: several prompts, one that is cut, a long one, or what cannot be read.
    """
    if not (_is_null(fields.get("truncate_prompt_tokens")) and is_short(fields)):
        return None
    try:
        head = _head(fields)
        if "messages" in fields:
            messages = msgspec.json.decode(fields["messages"], type=list[dict[str, Any]])
            return _chat(head, messages, last_turn.begin(messages, has_tools="tools" in head))
        return _prompt(msgspec.json.encode(head), msgspec.json.decode(fields["prompt"])) if "prompt" in fields else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError, TypeError):
        return None


def is_short(fields: Mapping[str, msgspec.Raw | bytes]) -> bool:
    """Whether the text of a body, as a client sent it or as chat has it, is short enough for a chain."""
    return sum(len(fields[name]) for name in _SOURCES if name in fields) <= MAX_CHAIN_BYTES


def step_ends(size: int, starts: Sequence[int] = ()) -> list[int]:
    """Where the steps of a text of `size` bytes end: each STEP_BYTES, and at the first of the `starts` of contents."""
    whole = range(STEP_BYTES, size + 1, STEP_BYTES)
    return sorted({*whole, *(start for start in starts[:MAX_STARTS] if 0 < start <= size)})


def step_hashes(key: bytes, salt: str, text: bytes, starts: Sequence[int] = ()) -> tuple[int, ...]:
    """A hash of 64 bits for each of `step_ends`; each covers everything before it. `key`: of `chain_key`.

    Each is the digest of one running state: a keyed state for each step would hash its key again, a quarter more time.
    """
    root = blake2b(salt.encode(errors="surrogatepass"), key=key, digest_size=8, person=b"pd-text-root").digest()
    state = blake2b(root, key=key, digest_size=8, person=b"pd-text-step")
    digests, begin = [], 0
    for end in step_ends(len(text), starts):
        state.update(text[begin:end])
        digests.append(state.digest())
        begin = end
    return unpack(f"<{len(digests)}Q", b"".join(digests))


def flat_content(content: Any) -> str | None:
    """A message's content as one string, as nodes give it to chat templates. None: it is not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [_part_text(part) for part in content]
    return None if None in texts else "\n".join(text for text in texts if text is not None)


def _part_text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    return text if isinstance(text, str) else None


def _may_reason(message: Mapping[str, Any]) -> bool:
    text = flat_content(message.get("content") or "")
    return text is None or END_OF_REASONING in text or any(map(message.get, REASONING_MEMBERS))


def _head(fields: Mapping[str, msgspec.Raw | bytes]) -> dict[str, Any]:
    values = {name: msgspec.json.decode(fields[name]) for name in HEAD_FIELDS if not _is_null(fields.get(name))}
    if not values.get("tools") or _is_no_call(fields.get("tool_choice")):
        values.pop("tools", None)  # as nodes: such tools are not shown to the template
    if isinstance(arguments := values.get("chat_template_kwargs"), dict):
        values["chat_template_kwargs"] = dict(sorted(arguments.items()))
    return values


def _chat(head: dict[str, Any], messages: list[dict[str, Any]], last_turn: int) -> CanonicalText:
    parts, starts = [msgspec.json.encode(head)], []
    size = len(parts[0])
    for number, message in enumerate(messages):
        if number == last_turn:
            parts.append(b"")
            size += 1
        content = flat_content(message.get("content"))
        keys = msgspec.json.encode(dict(sorted(_keys(message, has_text=content is not None))))
        text = b"" if content is None else content.encode()
        parts += [keys, text]
        starts.append(size + len(keys) + 2)
        size = starts[-1] + len(text)
    return CanonicalText(END.join([*parts, b""]), tuple(starts))


def _keys(message: dict[str, Any], *, has_text: bool) -> Iterator[tuple[str, Any]]:
    """The members that may reach a template beside the text: nodes leave out those that are null, and no calls."""
    for key, value in message.items():
        if value is not None and not (has_text and key == "content") and not (key == "tool_calls" and value == []):
            yield key, value


def _prompt(head: bytes, prompt: Any) -> CanonicalText:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        kind, data = b"text", prompt.encode()
    else:
        kind, data = b"ids", array("I", prompt).tobytes()
    head = END.join((head, kind, b""))
    return CanonicalText(head + data, (len(head),), kind == b"ids")


def _is_no_call(raw: msgspec.Raw | bytes | None) -> bool:
    choice = None if raw is None else msgspec.json.decode(raw)
    return "none" in (choice, choice.get("type") if isinstance(choice, dict) else None)


def _is_null(raw: msgspec.Raw | bytes | None) -> bool:
    return raw is None or (len(raw) < 64 and bytes(raw).strip() == b"null")
