"""The process that writes and checks the grammars of an API process: one JSON line in, one out, until the input ends.

A grammar from a client may make llguidance overflow its stack (3,000 rules in a chain) or compute for minutes (300
regexes in an `&`). Here that ends a process that is started again, and not the node.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_cluster.server.message_grammar import MessageForm, write_message
from pd_cluster.worker.grammars import GrammarState, compile_grammar, load_vocabulary, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

CPU_LIMIT_S = 0.2  # of one grammar: then the kernel ends the process. The slowest of 390 real schemas took 0.14 s
MAX_STACK_BYTES = 4 << 20
UNLIMITED_STACK_BYTES = 2 << 20  # what glibc gives a thread under `ulimit -s unlimited`


def write(
    kind: str,
    value: str,
    choices: list[str],
    *,
    coerces_one_of: bool,
    message: dict[str, Any] | None = None,
    token_ids: Mapping[str, int] | None = None,
) -> str:
    """The grammar in llguidance's language. Raises Exception for a value that cannot be read.

    `message`: the fields of the MessageForm that has the grammar as its content.
    """
    content = _write(kind, value, choices, coerces_one_of=coerces_one_of)
    return write_message(MessageForm(**message), content, token_ids or {}) if message else content


def _write(kind: str, value: str, choices: list[str], *, coerces_one_of: bool) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    # Without blanks between tokens: weak models repeat blanks where a grammar allows them
    options: Any = {"whitespace_flexible": False, "coerce_one_of": coerces_one_of}
    match kind:
        case "json":
            return str(LLMatcher.grammar_from_json_schema(value, overrides=options))
        case "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=options))
        case "regex":
            return str(LLMatcher.grammar_from_regex(value))
        case "choice":
            # One terminal, which the lexer follows: a rule may have 2,000 alternatives. Lark refuses a bare DEL
            texts = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in choices)
            return f"start: CHOICE\nCHOICE: {' | '.join(texts)}\n"
        case "grammar":
            return str(any_to_lark(value))
    return value  # of another node: written already


def _serve(tokenizer_json: Path, vocab_size: int) -> None:
    import llguidance

    vocabulary, unreadable, executor = None, "", llguidance.LLExecutor(1)
    token_ids: dict[str, int] = {}
    try:
        token_ids = _added_tokens(tokenizer_json, vocab_size)
        vocabulary = load_vocabulary(tokenizer_json, vocab_size, [vocab_size - 1])
    except Exception as error:  # a missing file, or a format that llguidance lacks
        unreadable = f"this model's tokenizer.json cannot be used for grammars: {error}"
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        said, text = unreadable, ""
        try:
            text = write(**json.loads(line), token_ids=token_ids)
            matcher = compile_grammar(vocabulary, executor, text) if not said else None
            said = GrammarState(matcher).error if matcher is not None else said
        except Exception as error:  # the converter of GBNF raises plain Exceptions
            said = str(error) or type(error).__name__
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = {"error": one_line(said)} if said else {"grammar": text}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _added_tokens(tokenizer_json: Path, vocab_size: int) -> dict[str, int]:
    added = json.loads(tokenizer_json.read_text()).get("added_tokens", [])
    return {token["content"]: token["id"] for token in added if token["id"] < vocab_size}


def _stack_bytes() -> int:
    """Half of what the engine's threads have, which compile under the same limit: what passes here passes there."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return min(MAX_STACK_BYTES, (UNLIMITED_STACK_BYTES if limit == resource.RLIM_INFINITY else limit) // 2)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a client could fill the disk with them
    threading.stack_size(_stack_bytes())
    thread = threading.Thread(target=_serve, args=(Path(sys.argv[1]), int(sys.argv[2])))
    thread.start()
    thread.join()
