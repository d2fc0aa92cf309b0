"""`python -m benchmarks request_path`: files of `pd_cluster/server` that a chat goes through, in their order.

One chat over the demo model's tokenizer and an engine that answers at once, in this process. Its way has three parts:

    the body     from the endpoint, until the body is decoded: the first call of `--start`
    the work     from there, until the engine has the request
    the answer   from there, until the client has the last byte

A stay is a run of calls in one file. A file that is entered again is a return: its reader must come back to it. Calls
are those of functions and methods of their own names. Properties, constructors, lambdas and generator expressions are
values, read where they are used, and are left out. What the tokenizer's thread calls is not seen.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import pd_cluster
from pd_cluster.config import ModelConfig, NodeConfig
from pd_cluster.engine.client import RequestStream
from pd_cluster.engine.news_mirror import NewsMirror
from pd_cluster.protocol.messages import EngineReady, FinishReason, SequenceTokens, TokensOut
from pd_cluster.server.app import create_app
from pd_cluster.server.state import NodeState
from pd_cluster.server.text.tokenizer import Tokenizer
from pd_connectors.protocol.messages import SampledToken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import CodeType, FrameType

    from pd_cluster.engine.client import EngineClient
    from pd_cluster.protocol.messages import AddRequest, EngineStats, ToEngine

PACKAGE = Path(pd_cluster.__file__).parent
SERVER = f"{PACKAGE / 'server'}/"
PARTS = ("the body", "the work", "the answer")
ENDPOINT, START = "chat_completions", "generate"
NOT_CALLED = ("__init__", "__post_init__")
ANSWER = (300, 301, 302)  # one step each: so a loop over steps is seen three times


class EnteredFile(NamedTuple):
    """A call of a function in a file of the server."""

    file: str
    function: str


class FileStay(NamedTuple):
    """A run of calls in one file."""

    file: str
    functions: tuple[str, ...]


class AnsweringEngine:
    """Implements EngineClient: it answers each request with `ANSWER`, and notes when it got it."""

    def __init__(self, note_opened: Callable[[], None]) -> None:
        self._note_opened = note_opened
        self.ready: EngineReady | None = EngineReady(
            engine_id="answering", epoch=1, num_blocks=100, block_size=16, max_model_len=4096, fingerprint="",
            connector="none", control_port=0, max_num_seqs=8,
        )  # fmt: skip
        self.stats: EngineStats | None = None
        self.news = NewsMirror()
        self.alive, self.frozen, self.num_freezes = True, "", 0
        self.on_freeze: Callable[[], None] = lambda: None
        self.on_adapter: Callable[[Any], None] = lambda message: None

    def check_open(self) -> None:
        pass

    def open(self, request: AddRequest) -> RequestStream:
        self._note_opened()
        stream = RequestStream(request.request_id, self.send, lambda _: None)
        for token_id in ANSWER:
            ends = token_id == ANSWER[-1]
            new = SequenceTokens(0, (SampledToken(token_id),), FinishReason.LENGTH if ends else None)
            stream.push(TokensOut(request.request_id, (new,), ends, 0, 0, None))
        return stream

    def send(self, message: ToEngine) -> None:
        pass


class PathTracer:
    """Notes the calls of one thread in files of the server, while it is on."""

    def __init__(self) -> None:
        self.entries: list[EnteredFile] = []
        self.num_before_engine = 0
        self._frames: list[FrameType] = []  # kept, so that no frame has another's id
        self._seen: set[int] = set()
        self._properties = set(_properties())

    def note_opened(self) -> None:
        self.num_before_engine = len(self.entries)

    def __enter__(self) -> None:
        sys.setprofile(self._note)

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SERVER) or code in self._properties:
            return
        if code.co_name.startswith("<") or code.co_name in NOT_CALLED or id(frame) in self._seen:
            return  # of a coroutine that goes on, the frame has been seen
        self._seen.add(id(frame))
        self._frames.append(frame)
        self.entries.append(EnteredFile(code.co_filename.removeprefix(SERVER), code.co_qualname))


def main(arguments: Sequence[str]) -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks request_path", allow_abbrev=False)
    parser.add_argument("--start", default=START, metavar="NAME", help=f"Begins the work (default: {START}).")
    parser.add_argument("--whole", action="store_true", help="An answer that is not streamed.")
    namespace = parser.parse_args(arguments)
    for part, stays in path_of_chat(streamed=not namespace.whole, start=namespace.start).items():
        for stay in stays:
            sys.stdout.write(f"    {stay.file:24} {', '.join(stay.functions)}\n")
        num_files = len({stay.file for stay in stays})
        sys.stdout.write(f"{part}: {len(stays)} stays in {num_files} files, {len(stays) - num_files} returns\n")
    return 0


def path_of_chat(*, streamed: bool, start: str = START) -> dict[str, list[FileStay]]:
    """The stays of each of `PARTS`. Raises ValueError when no function `start` was called."""
    tracer = PathTracer()
    asyncio.run(_serve(tracer, streamed=streamed))
    names = [entry.function for entry in tracer.entries]
    begun, num_before_engine = names.index(ENDPOINT), tracer.num_before_engine
    worked = next((at for at, name in enumerate(names) if name.rpartition(".")[2] == start), None)
    if worked is None:
        raise ValueError(f"{start} was not called")
    parts = (tracer.entries[begun:worked], tracer.entries[worked:num_before_engine], tracer.entries[num_before_engine:])
    return {part: stays_of(entries) for part, entries in zip(PARTS, parts, strict=True)}


def stays_of(entries: Sequence[EnteredFile]) -> list[FileStay]:
    """Neighbouring calls in one file are one stay, with each function once."""
    stays: list[FileStay] = []
    for file, function in entries:
        if not stays or stays[-1].file != file:
            stays.append(FileStay(file, ()))
        if function not in stays[-1].functions:
            stays[-1] = FileStay(file, (*stays[-1].functions, function))
    return stays


async def _serve(tracer: PathTracer, *, streamed: bool) -> None:
    """Serve a chat, and then one that is traced: the first imports what is imported late."""
    engine: EngineClient = AnsweringEngine(tracer.note_opened)
    config = NodeConfig(model=ModelConfig(model=str(PACKAGE / "demo_model"), served_model_name=("demo",)))
    tokenizer = Tokenizer.load(PACKAGE / "demo_model")
    app = create_app(NodeState(config=config, engine=engine, tokenizer=tokenizer, key=b"k" * 32))
    messages = [{"role": "user", "content": "hi"}]
    body = msgspec.json.encode({"model": "demo", "messages": messages, "stream": streamed})
    try:
        await _post(app, body)
        with tracer:
            await _post(app, body)
    finally:
        tokenizer.close()


async def _post(app: Any, body: bytes) -> None:
    """Raises ValueError unless the answer is whole."""
    received, sent = [{"type": "http.request", "body": body, "more_body": False}], list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if not received:
            await asyncio.Event().wait()  # the client stays
        return received.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    path = "/v1/chat/completions"
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await app(scope, receive, send)
    if sent[0]["status"] != 200 or sent[-1]["more_body"]:
        raise ValueError(f"the chat was answered with {sent}")


def _properties() -> Iterator[CodeType]:
    for name, module in list(sys.modules.items()):
        if name.startswith("pd_cluster.server."):
            for kind in vars(module).values():
                members = vars(kind).values() if isinstance(kind, type) else ()
                yield from (one.fget.__code__ for one in members if isinstance(one, property) and one.fget)
