"""The process that writes and checks the grammars of an API process: one JSON line in, one out, until the input ends.

A grammar from a client may make llguidance overflow its stack (3,000 rules in a chain) or compute for minutes (300
regexes in an `&`). Here that ends a fork of this process, and not the node. The next fork costs 7 ms of CPU until its
first answer (12 with 131,000 tokens); a process that reads the vocabulary again would cost 0.3 s (1 s).
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from pd_cluster.server.grammar.json_schema import TOO_DEEP, guided, pruned
from pd_cluster.server.grammar.message_grammar import MessageForm, write_message
from pd_cluster.worker.grammar_vocabulary import GrammarTokens, GrammarVocabulary
from pd_cluster.worker.grammars import NO_WAY_ON, GrammarState, compile_grammar, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

CPU_LIMIT_S = 0.2  # of one grammar: then the kernel ends the process. The slowest of 390 real schemas took 0.14 s
# Of a text after the first mask, and its CPU time: 0.7 ms, 2.1 at p99, of 600 real schemas with 131,000 tokens
WALK_TOKENS = 16
WALK_S = 0.02
# Checks give way to everything else of the machine: one client's can keep a core busy
NICENESS = 10
ENDED = b"\n"  # the answer for a grammar that has ended the process that checked it
MAX_STACK_BYTES = 4 << 20
UNLIMITED_STACK_BYTES = 2 << 20  # what glibc gives a thread under `ulimit -s unlimited`


def write(
    kind: str,
    value: str,
    choices: list[str],
    *,
    coerces_one_of: bool,
    strict: bool = False,
    blanks: bool = True,
    message: dict[str, Any] | None = None,
    token_ids: Mapping[str, int] | None = None,
) -> str:
    """The grammar in llguidance's language. Raises Exception for a value that cannot be read.

    `strict`: refuse formats that the grammar cannot hold to. `blanks`: JSON may have a blank after `,` and `:`.
    `message`: the fields of the MessageForm that has the grammar as its content.
    """
    if kind in ("json", "json_object"):
        text = value if kind == "json" else '{"type":"object"}'
        content = _write_json(text, coerces_one_of=coerces_one_of, strict=strict, blanks=blanks)
    else:
        content = _write(kind, value, choices)
    return write_message(MessageForm(**message), content, token_ids or {}) if message else content


def _write_json(text: str, *, coerces_one_of: bool, strict: bool, blanks: bool) -> str:
    from llguidance import LLMatcher

    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except ValueError:
        schema = None  # llguidance says why
    if isinstance(schema, dict):
        known = pruned(schema, strict=strict)
        known = guided(known, schema.get("x-guidance"), coerces_one_of=coerces_one_of, blanks=blanks)
        text = json.dumps(known)
    return str(LLMatcher.grammar_from_json_schema(text, overrides={}))


def _write(kind: str, value: str, choices: list[str]) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match kind:
        case "regex":
            return str(LLMatcher.grammar_from_regex(value))
        case "choice":
            # One terminal, which the lexer follows: a rule may have 2,000 alternatives. Lark refuses a bare DEL
            texts = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in choices)
            return f"start: CHOICE\nCHOICE: {' | '.join(texts)}\n"
        case "grammar":
            return str(any_to_lark(value))
    return value  # of another node: written already


_Known = GrammarVocabulary | None  # None: it cannot be read


class _Worker:
    """A fork of this process. It has the vocabulary from the start on, and answers line by line until one ends it."""

    def __init__(self, vocabulary: _Known, token_ids: dict[str, int], unreadable: str) -> None:
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _run(theirs, vocabulary, token_ids, unreadable)
            os._exit(0)
        theirs.close()
        self._lines = ours.makefile("rwb")
        ours.close()

    @property
    def has_ended(self) -> bool:
        return os.waitpid(self._pid, os.WNOHANG)[0] != 0

    def ask(self, line: bytes) -> bytes:
        """The answer; an empty line: the grammar has ended the worker, which must not be used any more."""
        try:
            self._lines.write(line)
            self._lines.flush()
            answer = self._lines.readline()
        except OSError:
            answer = b""
        if not answer.endswith(b"\n"):
            os.waitpid(self._pid, 0)
            return ENDED
        return answer


def _run(lines: socket.socket, vocabulary: _Known, token_ids: dict[str, int], unreadable: str) -> None:
    """Answer in a thread, because only a thread's stack can be limited, until the other end is closed."""
    threading.stack_size(_stack_bytes())
    thread = threading.Thread(target=_answer, args=(lines.makefile("rwb"), vocabulary, token_ids, unreadable))
    thread.start()
    thread.join()


def _answer(lines: BinaryIO, vocabulary: _Known, token_ids: dict[str, int], unreadable: str) -> None:
    import llguidance

    executor = llguidance.LLExecutor(1)
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        said, text = unreadable, ""
        try:
            text = write(**json.loads(line), token_ids=token_ids)
            if vocabulary is not None:
                said = _error_of(text, vocabulary, executor)
        except Exception as error:  # the converter of GBNF raises plain Exceptions
            said = str(error) or type(error).__name__
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = {"error": one_line(said)} if said else {"grammar": text}
        lines.write(json.dumps(answer).encode() + b"\n")
        lines.flush()


def _error_of(grammar: str, vocabulary: GrammarVocabulary, executor: Any) -> str:
    """Why the grammar cannot be followed; "" if it can, as far as it is known."""
    tokenizer = vocabulary.tokenizer
    state = GrammarState(compile_grammar(tokenizer, executor, grammar, encodes=vocabulary.encodes))
    if state.error:
        return state.error
    error = _error_after_walk(state, np.zeros(-(-tokenizer.vocab_size // 32), np.int32))
    return f"an answer exceeds the limits of the grammar: {error}" if error not in ("", NO_WAY_ON) else ""


def _error_after_walk(state: GrammarState, mask: npt.NDArray[np.int32]) -> str:
    """The error of the state after at most WALK_TOKENS tokens, each a random one of those that the grammar allows."""
    rng, started_s = random.Random(0), time.thread_time()
    for _ in range(WALK_TOKENS):
        state.fill(mask)
        words = np.flatnonzero(mask)
        if state.error or not len(words) or time.thread_time() - started_s > WALK_S:
            break
        word = int(rng.choice(words))
        bit = rng.choice([at for at in range(32) if mask[word] >> at & 1])
        state.advance([32 * word + bit])
        if state.is_over:
            break
    return state.error


def _stack_bytes() -> int:
    """Half of what the engine's threads have, which compile under the same limit: what passes here passes there."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return min(MAX_STACK_BYTES, (UNLIMITED_STACK_BYTES if limit == resource.RLIM_INFINITY else limit) // 2)


def _serve(tokenizer_json: Path, vocab_size: int) -> None:
    """Give each line to a worker. One that has ended, by its grammar or otherwise, is replaced by the next fork."""
    import llguidance.numpy  # noqa: F401 - here, so that no fork spends 50 ms on the import

    vocabulary: _Known = None
    unreadable = ""
    token_ids: dict[str, int] = {}
    try:
        tokens = GrammarTokens.read(tokenizer_json, vocab_size)
        token_ids = tokens.added
        vocabulary = tokens.vocabulary([tokens.stand_in_eos])
    except Exception as error:  # a missing file, or a format that its library lacks
        unreadable = f"this model's tokenizer.json cannot be used for grammars: {error}"
    os.nice(NICENESS)
    worker = _Worker(vocabulary, token_ids, unreadable)
    for line in sys.stdin.buffer:
        if worker.has_ended:
            worker = _Worker(vocabulary, token_ids, unreadable)
        answer = worker.ask(line)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
        if answer == ENDED:
            worker = _Worker(vocabulary, token_ids, unreadable)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a client could fill the disk with them
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
