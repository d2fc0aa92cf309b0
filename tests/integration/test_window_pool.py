"""Models with windows behind a pool that outlives their nodes: new nodes take prompts from it, each KV group's part.

Nodes with empty caches are asked one thing after the other, so what they read of the pool is known to the byte: of
layers that see everything the blocks that the node lacks, of a window those that the next token reads.
"""

from __future__ import annotations

import random
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pd_connectors.mooncake import MooncakeClient
from tests.connectors.mooncake_master import MooncakeMaster, needs_mooncake
from tests.connectors.store_server import StoreServer, needs_lmcache
from tests.deadlines import HANG_S
from tests.integration.number_model import save_tokenizer, token_ids
from tests.integration.system import Answer, Path, System, running_system, wait_until
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import random_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Nodes = Callable[..., AbstractContextManager[System]]

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

COMPLETIONS = "/v1/completions"
ROUTES = (Path.P_FIRST, Path.D_FIRST)
PREFILLERS = {Path.P_FIRST: "prefill", Path.D_FIRST: "decode"}  # of prompts of which the pool has nearly all
SIZE, WINDOW = 16, 24  # tokens, of a block and of what layers with a window see
LAYERS = {"gemma3": (1, 6), "gpt-oss-mxfp4": (2, 2)}  # that see everything, and with a window
LAYER_BYTES = 2 * 2 * SIZE * 16 * 4  # of a block: K and V of two KV heads of 16 in float32, in both models
NUM_TOKENS = 40  # over the window
TOO_LITTLE = 17  # tokens: a decode node computes fewer itself
HITS, READ, STORED, LOOKUPS, BACKLOG = (
    f"pd_pool_{name}"
    for name in ("hit_tokens_total", "read_bytes_total", "blocks_stored_total", "lookups_total", "backlog_bytes")
)


class Part(NamedTuple):
    """What a node takes from the pool for a prompt: tokens, blocks of layers that see everything, of windows."""

    num_tokens: int = 0
    num_full: int = 0
    num_window: int = 0

    def num_bytes(self, model: str) -> int:
        full, window = LAYERS[model]
        return (full * self.num_full + window * self.num_window) * LAYER_BYTES


LONG, OTHER, SHORT, TAIL = random_prompts((200, 333, 24, 60), VOCAB_SIZE, seed=3)
PROMPTS = {  # in the order in which they are asked, and what an empty node takes that has served those before
    "long": (LONG, Part(192, 12, 2)),
    "diverges in the last whole block": (LONG[:192] + TAIL[:23], Part(16, 1, 1)),
    "diverges after the last whole block": (LONG[:192] + TAIL[30:38], Part()),
    "shares a beginning of which the windows are gone": (LONG[:144] + TAIL, Part(192, 3, 2)),
    "longer": (OTHER, Part(320, 20, 2)),
    "window": (SHORT, Part(16, 1, 1)),
    "less than a block": (SHORT[-5:], Part()),
}
NUM_COMPUTED = {"prefill": 37, "decode": 16}  # blocks of each group that nodes compute for these, each once
BRANCH = LONG[:100] + TAIL[::-1]  # never asked before; after its six blocks the window is their last two
assert WINDOW <= 2 * SIZE


@contextmanager
def lmcache() -> Iterator[tuple[str, ...]]:
    """A pool that is there to the end. Yields the flags of its nodes."""
    with StoreServer() as server:
        yield "--connector=lmcache", f"--pool-url={server.url}"


@contextmanager
def mooncake() -> Iterator[tuple[str, ...]]:
    """The same. Nodes lend no memory: what lies there would end with them."""
    with MooncakeMaster() as master:
        lender = MooncakeClient(("127.0.0.1", master.port), "127.0.0.1", 64 << 20)
        with closing(lender):
            with lender.call():
                pass  # its memory is there
            yield "--connector=mooncake", f"--pool-url={master.url}", "--pool-segment-gb=0"


@pytest.fixture(
    scope="module",
    params=[pytest.param(lmcache, marks=needs_lmcache), pytest.param(mooncake, marks=needs_mooncake)],
    ids=["lmcache", "mooncake"],
)
def nodes(request: pytest.FixtureRequest, model_flag: str) -> Iterator[Nodes]:
    """Calls start nodes with empty caches before one pool. A prompt is computed in several steps."""
    with request.param() as flags:
        sizes = (f"--block-size={SIZE}", f"--min-remote-tokens={TOO_LITTLE}", "--max-num-batched-tokens=64")
        own = (model_flag, *sizes, f"--pool-deadline-s={HANG_S}")
        yield lambda *more: running_system(*own, *flags, *more)


@pytest.fixture(scope="module", params=LAYERS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model_flag(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    saved = ModelStore(tmp_path_factory.mktemp("models")).get(model)
    save_tokenizer(saved.directory)
    return f"--model={saved.directory}"


@pytest.fixture(scope="module")
def expected(model_flag: str) -> dict[str, list[int]]:
    """Of nodes without a pool."""
    with running_system(model_flag, f"--block-size={SIZE}") as system:
        prompts = {name: prompt for name, (prompt, _) in PROMPTS.items()} | {"branch": BRANCH}
        answers = system.ask_all(Path.P_FIRST, [(COMPLETIONS, body(prompt)) for prompt in prompts.values()])
        return dict(zip(prompts, map(token_ids, answers), strict=True))


def body(prompt: list[int], salt: str | None = None) -> dict[str, Any]:
    """`salt`: by order, so that neither finds what the other one stored."""
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "cache_salt": salt}


def ask(system: System, path: Path, prompt: list[int]) -> Answer:
    return system.ask(path, COMPLETIONS, body(prompt, path))


def settled(system: System, node: str) -> dict[str, float]:
    """The node's metrics with all that it did for the answers so far, and when it has stored all of that."""
    system.settled_metrics(node)
    wait_until(lambda: not system.metric(node, BACKLOG), lambda: f"{node} stores: {system.metrics(node)}")
    return system.settled_metrics(node)


def changes(before: dict[str, float], after: dict[str, float], *names: str) -> list[float]:
    return [after[name] - before[name] for name in names]


def test_new_nodes_take_what_the_next_token_reads_of_each_group(
    nodes: Nodes, expected: dict[str, list[int]], model: str
) -> None:
    with nodes() as system:
        for path in ROUTES:
            before = {node: settled(system, node) for node in system.urls}
            for name, (prompt, _) in PROMPTS.items():
                assert token_ids(ask(system, path, prompt)) == expected[name], (path, name)
            stored = {node: settled(system, node)[STORED] - before[node][STORED] for node in system.urls}
            assert stored == {node: 2 * num for node, num in NUM_COMPUTED.items()}, path  # blocks of both groups
    with nodes() as system:
        for path in ROUTES:
            check_loads(system, path, expected, model)
            check_branch(system, path, expected["branch"], model)


def check_loads(system: System, path: Path, expected: dict[str, list[int]], model: str) -> None:
    prefiller = PREFILLERS[path]
    other = "decode" if prefiller == "prefill" else "prefill"
    idle = settled(system, other)
    for name, (prompt, part) in PROMPTS.items():
        before = settled(system, prefiller)
        answer = ask(system, path, prompt)
        assert token_ids(answer) == expected[name], (path, name)
        assert answer.headers["x-pd-prefill"] == prefiller
        after = settled(system, prefiller)
        assert changes(before, after, HITS, READ, STORED) == [part.num_tokens, part.num_bytes(model), 0], (path, name)
    assert changes(idle, settled(system, other), LOOKUPS, STORED) == [0, 0]


def check_branch(system: System, path: Path, expected: list[int], model: str) -> None:
    """The pool has windows in the middle of prompts, too: a prompt that leaves one there is computed from there on."""
    before = {node: settled(system, node) for node in system.urls}
    answer = ask(system, path, BRANCH)
    assert token_ids(answer) == expected
    assert (answer.headers["x-pd-prefill"], answer.headers["x-pd-decode"]) == ("prefill", "decode")
    found = {node: changes(before[node], settled(system, node), HITS, READ) for node in system.urls}
    known, empty = Part(96, 0, 2), Part(96, 6, 2)  # layers that see everything are cached where LONG was
    takes = {Path.P_FIRST: (known, Part()), Path.D_FIRST: (empty, known)}[path]
    assert found == {
        node: [part.num_tokens, part.num_bytes(model)] for node, part in zip(("prefill", "decode"), takes, strict=True)
    }


def test_nodes_short_of_memory_take_from_the_pool_what_they_gave_up(
    nodes: Nodes, expected: dict[str, list[int]]
) -> None:
    """All at once, some of it twice."""
    asked = [(name, path) for name in PROMPTS for path in (*ROUTES, Path.P_FIRST)] * 2
    random.Random(4).shuffle(asked)
    for _ in range(2):  # the pool has all that the second nodes ask for
        with nodes("--num-blocks=40") as system:
            bodies = [(COMPLETIONS, body(PROMPTS[name][0], f"{path} at once")) for name, path in asked]
            for path in ROUTES:
                chosen = [at for at, (_, own) in enumerate(asked) if own is path]
                answers = system.ask_all(path, [bodies[at] for at in chosen])
                for at, answer in zip(chosen, answers, strict=True):
                    assert token_ids(answer) == expected[asked[at][0]], asked[at]
            hits = sum(settled(system, node)[HITS] for node in system.urls)
    assert hits >= sum(part.num_tokens for _, part in PROMPTS.values())
