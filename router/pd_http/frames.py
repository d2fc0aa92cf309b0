"""Frames: the stream of a decode node to a router that can continue it on another node.

A router asks for them with the request header `x-pd-frames: 1`. The answer then has the type FRAMES_TYPE, and is a
`StreamHead`, any number of `Frame`, and one `StreamEnd` or `StreamFailed`, as messages of
`pd_connectors.protocol.stream_codec`. The client gets the `data` of whole frames, and nothing else. So what a client
has is what the frames say: the tokens of each choice, and how much of their text was released.
"""

from __future__ import annotations

import msgspec

from pd_http.node_report import NodeReport

FRAMES_TYPE = "application/x-pd-frames"
FRAMES_HEADER = "x-pd-frames"
FRAMES_VERSION = "1"


class StreamHead(msgspec.Struct, frozen=True, array_like=True, tag="head"):
    """What another node needs to write the same stream. Sent with the first tokens."""

    # of weights, tokenizer, chat template, parser and sampling, as /health says: a node with another one refuses.
    # "": the stream cannot be continued (it is a beam search)
    stream_version: str
    response_id: str  # without its prefix "chatcmpl-" or "cmpl-"
    created: int  # Unix seconds
    seed: int  # with which the first choice of the first prompt is drawn, resolved if the client gave none
    num_prompt_tokens: int  # of all prompts
    num_cached_tokens: int  # of the prompt, as the client's usage says; 0 for several, see `ChoiceProgress`
    prompt_digest: bytes  # of the token ids of all prompts


class ChoiceProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one choice. Their text may be held back: `num_chars` says how much was released."""

    index: int  # of the choice in the answer
    token_ids: tuple[int, ...]
    num_chars: int  # characters released in this frame: content, reasoning, names and arguments of calls; no echo
    finish_reason: str = ""  # "": the choice goes on
    num_cached_tokens: int = 0  # of its prompt, if the request has several: they do not begin at one time


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="frame"):
    """Atomic: the client has all of `data`, or none of it and of the tokens."""

    choices: tuple[ChoiceProgress, ...]
    data: bytes = b""  # whole server-sent events; b"": all text is held back


class StreamEnd(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The answer is complete."""

    data: bytes  # the usage if it was asked for, and [DONE]
    report: NodeReport | None = None  # None: of an older release


class StreamFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The node cannot go on. The router continues elsewhere if another node can, else it sends `data`."""

    status: int
    code: str
    data: bytes  # the error event for the client


class KnownChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a stream that is to be continued, as far as the client has it."""

    index: int
    token_ids: tuple[int, ...]
    num_chars: int  # the sum of all frames
    finish_reason: str = ""
    num_cached_tokens: int = 0  # of its prompt, if the request has several


class KnownHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of StreamHead, in JSON."""

    stream_version: str
    response_id: str
    created: int
    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_digest: str  # hexadecimal


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params.continuation` of a request: the stream to go on with, in JSON.

    The node writes nothing that the client has, and refuses with status 409 and code "cannot_continue" if it would not
    write the same.
    """

    head: KnownHead
    choices: tuple[KnownChoice, ...]  # those with tokens, and those that have ended


AnyFrame = StreamHead | Frame | StreamEnd | StreamFailed
