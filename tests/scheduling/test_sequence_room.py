"""What a sequence holds, and the longest one that fits, beside a walk through slabs."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from pd_cluster.scheduling.sequence_room import MOST_TOKENS, blocks_held, cache_tokens, fits
from pd_connectors.protocol.layout import BlockLayout, KVGroup, KVKind
from pd_connectors.protocol.slabs import KvSlabs

BLOCK = 4  # tokens
LONGEST_WALK = 120


def group(kind: KVKind, num_layers: int = 1, window: int = 0) -> KVGroup:
    """KV of `num_layers` layers, in blocks of BLOCK tokens."""
    return KVGroup(kind, tuple(range(num_layers)), (2, num_layers, 2, BLOCK, 8), "float32", BLOCK, window)


FULL, LATENT, STATE = (group(kind) for kind in (KVKind.FULL, KVKind.LATENT, KVKind.STATE))
ANY_GROUP = st.sampled_from([FULL, LATENT, STATE]) | st.builds(
    group, st.just(KVKind.WINDOW), st.integers(1, 5), st.integers(1, 40)
)
STEPS = st.integers(1, 24)  # tokens


def live(one: KVGroup, computed: int, end: int) -> range:
    """Blocks that a sequence needs for a step of tokens [computed, end), by what attention or a state reads."""
    match one.kind:
        case KVKind.WINDOW:
            first = max(0, computed - one.window + 1)
        case KVKind.STATE:
            first = max(0, computed - 1)
        case _:
            first = 0
    return range(first // BLOCK, (end - 1) // BLOCK + 1)


@given(ANY_GROUP, st.integers(1, LONGEST_WALK), STEPS)
def test_what_is_held_is_the_most_that_any_step_needs(one: KVGroup, num_tokens: int, step: int) -> None:
    most = max(len(live(one, start, min(num_tokens, start + step))) for start in range(num_tokens))
    assert most <= blocks_held(one, num_tokens, step) <= most + 1


class Walk:
    """Blocks of one sequence in slabs, given from partly used slabs first."""

    def __init__(self, groups: list[KVGroup], slabs: KvSlabs) -> None:
        self._groups, self._slabs = groups, slabs
        self._owned: list[dict[int, set[int]]] = [{} for _ in groups]  # by group: slab -> the prompt blocks in it
        self._unowned = list(range(slabs.num_slabs))

    def hold(self, index: int, blocks: range) -> bool:
        """Let go what is not in `blocks` and take what is missing. False: no slab is left for it."""
        owned = self._owned[index]
        for slab, inside in list(owned.items()):
            inside &= set(blocks)
            if not inside:
                del owned[slab]
                self._unowned.append(slab)
        for block in sorted(set(blocks) - set().union(*owned.values())):
            inside = next((one for one in owned.values() if len(one) < self._slabs.per_slab[index]), None)
            if inside is None:
                if not self._unowned:
                    return False
                inside = owned[self._unowned.pop()] = set()
            inside.add(block)
        return True

    def runs(self, num_tokens: int, step: int) -> bool:
        """Whether a sequence of `num_tokens` can be computed in steps of `step` tokens."""
        return all(
            self.hold(index, live(one, start, min(num_tokens, start + step)))
            for start in range(0, num_tokens, step)
            for index, one in enumerate(self._groups)
        )


@given(st.lists(ANY_GROUP, min_size=1, max_size=3), st.integers(2, 12), STEPS)
def test_the_longest_sequence_that_fits_can_be_computed_alone(
    groups: list[KVGroup], num_blocks: int, step: int
) -> None:
    slabs = KvSlabs.of_blocks(BlockLayout(tuple(groups)), num_blocks)
    longest = cache_tokens(groups, slabs, step)
    assert fits(groups, slabs, longest, step) or not longest
    assert longest == MOST_TOKENS or not fits(groups, slabs, longest + 1, step)
    assert Walk(groups, slabs).runs(min(longest, LONGEST_WALK), step)
    assert all(fits(groups, slabs, shorter, step) for shorter in range(min(longest, LONGEST_WALK)))


@given(st.integers(1, 5), st.integers(1, 20), st.integers(2, 12), STEPS)
def test_hardly_any_longer_one_could_be(layers: int, window: int, num_blocks: int, step: int) -> None:
    """A walk that needs as many slabs as there are fits: the rule is no more careful than a block of each window."""
    groups = [FULL, group(KVKind.WINDOW, layers, window)]
    slabs = KvSlabs.of_blocks(BlockLayout(tuple(groups)), num_blocks)
    longest = cache_tokens(groups, slabs, step)
    assume(longest < LONGEST_WALK)
    longer = longest + slabs.per_slab[0] * BLOCK * 2 + 1
    assert not Walk(groups, slabs).runs(longer, step)


@given(st.integers(2, 10**6), STEPS)
def test_one_group_of_whole_prompts_has_room_for_all_of_its_blocks(num_blocks: int, step: int) -> None:
    slabs = KvSlabs.of_blocks(BlockLayout((FULL,)), num_blocks)
    assert cache_tokens([FULL], slabs, step) == num_blocks * BLOCK


def test_windows_alone_have_room_for_any_length() -> None:
    one = group(KVKind.WINDOW, window=8)
    slabs = KvSlabs.of_blocks(BlockLayout((one,)), 5)
    assert [cache_tokens([one], slabs, step) for step in (8, 9)] == [MOST_TOKENS, 5 * BLOCK]
