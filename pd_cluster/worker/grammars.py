"""Grammars that constrain outputs: compiled by llguidance on host threads, followed by one state per sequence."""

from __future__ import annotations

import importlib.util
import logging
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import numpy as np

from pd_cluster.errors import InvalidRequest
from pd_cluster.worker.draw_places import mask_words
from pd_cluster.worker.grammar_vocabulary import GrammarTokens, GrammarVocabulary, Holes, has_tokenizer, model_chooses
from pd_cluster.worker.mask_threads import MaskThreads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from pd_cluster.drafting.forced import ForcedTokens
    from pd_cluster.worker.draw_places import Mask

logger = logging.getLogger(__name__)

MAX_KEPT = 64  # compiled grammars; a copy takes 22 us, compiling 1.6 ms at the median
MAX_DRAFTED = 16  # of them with another matcher for drafts: a hostile one may have 100 MB, and is soon made again
MOST_DRAFT_LEXERS = 32  # of those, and of dropped ones that rows still use, up to which a search begins one
MOST_TOLD = 1024  # runs of forced tokens that were not taken; older ones are dropped
NUM_THREADS = 2  # a slow compilation does not delay a quick one
# Of llguidance for masks. 64 rows on a host of 32 cores take 0.63, 0.43, 0.35, 0.35 and 0.31 ms with 1, 2, 4, 8 and 16;
# its own choice is four of five cores, which other threads of the engine then wait for
MASK_THREADS = 4
# Bounds of llguidance on one grammar. With its own (2,000 and 50,000 items) a mask of a hostile grammar took 0.5 s, and
# a compiled grammar could hold 250,000 states of 2 KB. 1,000 items are those of 250 optional properties. Of the 7,738
# schemas of JSONSchemaBench that compile, two run out of the 200,000 units of work that llguidance allows the lexer for
# a mask, which take 5 ms, and one needs 400,000. The other needs a mask of 1.2 s and 320 MB
LIMITS = {
    "max_items_in_row": 1000,
    "step_max_items": 20_000,
    "step_lexer_fuel": 400_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
FIRST_WORDS = 32  # of a mask: most masks allow one of these tokens, which takes a tenth of the time of all words to see
NO_WAY_ON = "it allows no further token, and the output must not end here"
NO_PACKAGE = "grammars need the package llguidance on every node: pip install 'pd-cluster[structured]'"


def compile_grammar(vocabulary: Any, executor: Any, grammar: str, *, encodes: bool = True) -> Any:
    """The matcher of a grammar at its beginning, with the first mask computed. The matcher may have an error.

    `vocabulary`, `encodes`: see `GrammarVocabulary`.
    """
    import llguidance
    import llguidance.numpy

    limits = llguidance.LLParserLimits(**LIMITS)
    text = grammar if encodes else model_chooses(grammar)
    matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
    if not matcher.is_error():
        mask = llguidance.numpy.allocate_token_bitmask(1, vocabulary.vocab_size)
        llguidance.numpy.fill_next_token_bitmask_par(executor, [(matcher, 0)], mask)
    return matcher


def one_line(said: str) -> str:
    """The first line of llguidance's message, and the reason that it has after a drawing of a regex."""
    first, *rest = said.split("\n")
    return " ".join([first, *[line for line in rest if line.startswith("error: ")][:1]])


class GrammarState:
    """The place of one sequence in its grammar. It is a function of the grammar and of the output tokens alone."""

    def __init__(self, matcher: Any, users: list[None] | None = None) -> None:
        self.matcher = matcher  # llguidance's
        self.users = [] if users is None else users  # of its lexer: the masks that are computed now
        self.first: GrammarState | None = None  # of the state of a row's drafts: the one that it is a copy of

    def copy(self) -> GrammarState:
        """A state at the same place. What it takes leaves no trace in this one, unless the lexer's limits are exceeded.

        Copies share the lexer.
        """
        return GrammarState(self.matcher.deep_copy(), self.users)

    @property
    def error(self) -> str:
        """Why the sequence cannot go on; "" while it can."""
        if not self.matcher.is_error():
            return ""
        why = one_line(str(self.matcher.get_error()))
        return NO_WAY_ON if why == "NoExtensionBias" else why  # its name for the discovery that nothing may follow

    @property
    def is_over(self) -> bool:
        """Whether the output has ended, or cannot go on."""
        return bool(self.matcher.is_stopped() or self.matcher.is_error())

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here. It is known after a token, and after a mask."""
        return bool(self.matcher.is_accepting())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take output tokens. A token that the grammar refuses sets `error`; tokens after the end are ignored."""
        for token_id in token_ids:
            if not self.matcher.is_stopped():
                self.matcher.consume_token(token_id)

    @property
    def forced(self) -> list[int]:
        """The next tokens that alone are allowed, after a mask of this place; some may be left out. Changes no mask."""
        return [*self.matcher.compute_ff_tokens()]

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Write the mask of the next token into `mask` [W], W = ceil(V / 32), without the interpreter's lock.

        Bit i of word j allows token 32 j + i.
        """
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


class _Tools(NamedTuple):
    """The vocabulary, and llguidance's threads for compilations and for masks: neither waits for the other."""

    vocabulary: GrammarVocabulary
    holes: Holes
    executor: Any
    mask_executor: Any
    idle_matcher: Any  # it takes no token, and has no lexer


class Grammars:
    """The grammars of one model's requests. Close it to end its threads.

    The vocabulary is read in a thread from the start on: 0.5 s for 128,000 tokens.

    States of one grammar are copies of one matcher, which share its lexer with its errors: once the lexer has run out
    of work for one copy, each other copy fails at its next token. So a state that fails is made again from a matcher
    of its own (`restart`), and only the failure of such a matcher is the state's own.
    """

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self.eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._restarts = ThreadPoolExecutor(1, thread_name_prefix="grammar-restart")  # delay no new grammar
        self.mask_threads = MaskThreads()
        self._compiled: OrderedDict[str, Future[Any]] = OrderedDict()
        self._of_drafts = OrderedDict[str, Any]()  # states at the beginning; the thread of drafts alone uses it
        self._draft_lexers = WeakSet[GrammarState]()  # all that were such states, and are used by drafts of a row
        self.forced = deque["ForcedTokens"](maxlen=MOST_TOLD)  # that were found, newest last
        self._is_sought, self._cannot_seek = False, False
        self._lock = Lock()  # of `_compiled`: the step loop prepares, and threads of masks restart
        self._refusal = ""
        if importlib.util.find_spec("llguidance") is None:
            self._refusal = NO_PACKAGE
        elif not has_tokenizer(model_dir):
            self._refusal = f"grammars need the model's tokenizer.json, which {model_dir.name} lacks"
        elif not self.eos_token_ids:
            self._refusal = f"grammars need an EOS token, and the configs of {model_dir.name} name none"
        else:
            self._tools = self._threads.submit(self._make_tools, model_dir / "tokenizer.json")

    def close(self) -> None:
        for threads in (self._threads, self._restarts):  # first: the end of a compilation begins a mask
            threads.shutdown(wait=True, cancel_futures=True)
        self.mask_threads.close()

    def prepare(self, grammar: str) -> Future[Any]:
        """Begin to compile a grammar. -> its first state; it stays whole when MAX_KEPT other grammars come.

        Raises InvalidRequest if this node cannot serve any.
        """
        if self._refusal:
            raise InvalidRequest(self._refusal, code="unsupported_value")
        with self._lock:
            compiled = self._compiled.get(grammar) or self._begin(grammar, self._threads)
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def is_compiling(self, grammar: str) -> bool:
        """Whether `prepare` has begun a compilation that has not ended. False for a grammar that was dropped since."""
        with self._lock:
            compiled = self._compiled.get(grammar)
        return compiled is not None and not compiled.done()

    def restart(self, grammar: str, failed: Future[Any]) -> Future[Any]:
        """Begin to compile a grammar for one state alone, because a state of `failed` has an error.

        -> its first state. The next request has the grammar compiled again, too. May be called from any thread.
        """
        with self._lock:
            if self._compiled.get(grammar) is failed:
                del self._compiled[grammar]
        return self._begin(grammar, self._restarts)

    def state(self, compiled: Future[Any]) -> GrammarState:
        """A new state at the beginning of a grammar that is compiled.

        Raises InvalidRequest for a grammar that cannot be compiled. A state of a grammar that has an error has this
        error.
        """
        if error := compiled.exception():
            raise InvalidRequest(f"the grammar cannot be compiled: {error}")
        first = compiled.result()
        return GrammarState(first.matcher.deep_copy(), first.users)

    @cached_property
    def _others(self) -> Mask:
        """The tokens that end no output."""
        others = np.ones(self._vocab_size, bool)
        others[self.eos_token_ids] = False
        return mask_words(others)

    def draft_state(self, grammar: str) -> GrammarState:
        """A state at the beginning of a grammar, of a matcher that drafts alone use. Compiles it for the first one.

        Called on the thread of drafts alone, as `forget_drafts`. Raises any exception.
        """
        state = self._of_drafts[grammar] = self._of_drafts.pop(grammar, None) or self._compile(grammar)
        if len(self._of_drafts) > MAX_DRAFTED:
            self._of_drafts.popitem(last=False)
        self._draft_lexers.add(state)
        copy = GrammarState.copy(state)
        copy.first = state
        return copy

    def may_seek(self, grammar: str) -> bool:
        """Whether a search may begin a draft state. One for drafts may in any case.

        Called on the thread of drafts.
        """
        return grammar in self._of_drafts or len(self._draft_lexers) < MOST_DRAFT_LEXERS

    def forget_drafts(self, grammar: str) -> None:
        """Have the grammar compiled for the next draft state, because one has an error."""
        self._of_drafts.pop(grammar, None)

    def take_forced(self) -> list[ForcedTokens]:
        """See `Executor.take_forced`."""
        self._is_sought = True
        return [self.forced.popleft() for _ in range(len(self.forced))]

    @property
    def seeks_forced(self) -> bool:
        """Whether what is forced is to be found: from the first `take_forced` on, until `seek_no_more`."""
        return self._is_sought and not self._cannot_seek

    def seek_no_more(self, error: BaseException) -> None:
        """Give up what is forced, because the library has failed at it."""
        self._cannot_seek = True
        logger.warning("tokens that grammars force are not drafted from now on: %r", error)

    def masks_after(self, states: Sequence[tuple[GrammarState, Sequence[int]]]) -> list[Mask | str]:
        """Advance each state by its tokens. -> of each the mask of its next token, or why it cannot go on.

        Raises any exception.
        """
        filled = np.empty((len(states), len(self._others)), np.int32)
        self.advance(states)
        self.fill(dict(enumerate(state for state, _ in states)), filled)
        allow_more = np.any(filled[:, :FIRST_WORDS] & self._others[:FIRST_WORDS], axis=1).tolist()
        return [
            self._error_at(state, allows_more=allows_more or bool((mask & self._others).any())) or mask
            for (state, _), mask, allows_more in zip(states, filled, allow_more, strict=True)
        ]

    def _error_at(self, state: GrammarState, *, allows_more: bool) -> str:
        """Why the sequence cannot go on; "" if it can. `allows_more`: the mask allows a token that ends no output."""
        if error := state.error:
            return error
        goes_on = allows_more or state.is_accepting or self._ends_by_name(state)
        return "" if goes_on else NO_WAY_ON  # only the end is allowed, where the output must not end

    def _ends_by_name(self, state: GrammarState) -> bool:
        """Whether a token for the end that the grammar names completes the output."""
        copies = [(state.copy(), (token_id,)) for token_id in self.eos_token_ids]
        self.advance(copies)
        return any(one.is_accepting for one, _ in copies)

    def advance(self, states: Sequence[tuple[GrammarState, Sequence[int]]]) -> None:
        """Advance each state by its tokens, as `GrammarState.advance`.

        `consume_token`, and a call for one matcher, wait for the lexer with the interpreter's lock: the step loop stood
        still for the mask of a copy, up to 20 ms. A call for more waits without it, but takes 35 us a token, not 2.
        """
        tools = self._tools.result()
        for at in range(max((len(token_ids) for _, token_ids in states), default=0)):
            going = [(one, ids[at]) for one, ids in states if at < len(ids) and not one.matcher.is_stopped()]
            if len(going) == 1 and not going[0][0].users:  # and no other thread begins a mask before the call
                going[0][0].matcher.consume_token(going[0][1])
            elif going:
                pairs = [(one.matcher, token_id) for one, token_id in going]
                tools.mask_executor.consume_token_par([*pairs, (tools.idle_matcher.deep_copy(), 0)])

    def fill(self, states: Mapping[int, GrammarState], masks: npt.NDArray[np.int32]) -> None:
        """Write the mask of each state into the row of `masks` (int32 [M, W]) that it is listed under.

        See `GrammarState.fill`. One state is filled on this thread, several on threads of llguidance. The call ends
        with the slowest of them. Rows of the model without a token are never allowed.
        """
        import llguidance.numpy

        tools = self._tools.result()
        for state in states.values():
            state.users.append(None)
        try:
            if len(states) > 1:
                matchers = [(state.matcher, row) for row, state in states.items()]
                llguidance.numpy.fill_next_token_bitmask_par(tools.mask_executor, matchers, masks)
            else:
                for row, state in states.items():
                    state.fill(masks[row])
        finally:
            for state in states.values():
                state.users.pop()
        tools.holes.close(masks)

    def _begin(self, grammar: str, threads: ThreadPoolExecutor) -> Future[Any]:
        try:
            compiled = threads.submit(self._compile, grammar)
        except RuntimeError as error:  # the system refuses a thread, or this is being closed: the row ends alone
            compiled = Future()
            compiled.set_exception(error)
        compiled.add_done_callback(lambda _: self.mask_threads.ring())
        return compiled

    def _make_tools(self, path: Path) -> _Tools:
        import llguidance

        tokens = GrammarTokens.read(path, self._vocab_size)
        executors = llguidance.LLExecutor(1), llguidance.LLExecutor(MASK_THREADS)
        vocabulary = tokens.vocabulary(self.eos_token_ids)
        idle_matcher = llguidance.LLMatcher(vocabulary.tokenizer, "no grammar", log_level=0)
        return _Tools(vocabulary, tokens.holes, *executors, idle_matcher)

    def _compile(self, grammar: str) -> GrammarState:
        """The first mask is computed here too: it took up to 0.1 s, and copies share what it has found."""
        tools = self._tools.result()
        vocabulary = tools.vocabulary
        return GrammarState(compile_grammar(vocabulary.tokenizer, tools.executor, grammar, encodes=vocabulary.encodes))
