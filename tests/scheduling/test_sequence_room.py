"""What a decoding sequence holds, and the longest one that fits, beside blocks that are put into slabs one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.scheduling.sequence_room import cache_tokens, decode_blocks, fits, host_unit
from pd_connectors.protocol.layout import BlockLayout, KVGroup, KVKind
from pd_connectors.protocol.slabs import KvSlabs
from tests.scheduling.kv_groups import SETS

BLOCK = 4  # tokens


def group(kind: KVKind, num_layers: int = 1, window: int = 0) -> KVGroup:
    """KV of `num_layers` layers, in blocks of BLOCK tokens."""
    return KVGroup(kind, tuple(range(num_layers)), (2, num_layers, 2, BLOCK, 8), "float32", BLOCK, window)


FULL = group(KVKind.FULL)
LAYERS, WINDOWS = st.integers(1, 7), st.integers(1, 40)
ANY_GROUP = st.builds(group, st.sampled_from([KVKind.FULL, KVKind.LATENT]), LAYERS) | st.builds(
    group, st.just(KVKind.WINDOW), LAYERS, WINDOWS
)


@pytest.mark.long
@given(ANY_GROUP, st.integers(1, 200))
def test_a_decoding_sequence_holds_what_is_read_later(one: KVGroup, num_tokens: int) -> None:
    first_read = max(0, num_tokens - one.window + 1) if one.window else 0
    held = {token // BLOCK for token in range(num_tokens) if token // BLOCK >= first_read // BLOCK}
    assert decode_blocks(one, num_tokens) == max(1, len(held))


def can_be_put(groups: list[KVGroup], slabs: KvSlabs, num_tokens: int) -> bool:
    """Whether slabs are left for every block of a sequence, when each group fills its last slab first."""
    num_left = slabs.num_slabs
    for index, one in enumerate(groups):
        room = 0
        for _ in range(0, num_tokens, one.block_size):
            if not room:
                num_left, room = num_left - 1, slabs.per_slab[index]
            room -= 1
    return num_left >= 0


@pytest.mark.long
@given(st.lists(ANY_GROUP, min_size=1, max_size=3), st.integers(1, 20))
def test_the_longest_sequence_that_fits_is_the_longest_that_can_be_put_into_slabs(
    groups: list[KVGroup], num_blocks: int
) -> None:
    slabs = KvSlabs.of_blocks(BlockLayout(tuple(groups)), num_blocks)
    longest = cache_tokens(groups, slabs)
    assert longest >= num_blocks * BLOCK  # that is what `of_blocks` promises
    assert can_be_put(groups, slabs, longest)
    assert not can_be_put(groups, slabs, longest + 1)
    for num_tokens in (1, longest - 1, longest, longest + 1, 2 * longest):
        assert fits(groups, slabs, num_tokens) == can_be_put(groups, slabs, num_tokens)


@pytest.mark.long
@given(st.integers(1, 10**6))
def test_one_group_has_room_for_all_of_its_blocks(num_blocks: int) -> None:
    slabs = KvSlabs.of_blocks(BlockLayout((FULL,)), num_blocks)
    assert cache_tokens([FULL], slabs) == num_blocks * BLOCK


def test_host_memory_has_twice_the_bytes_of_states_for_other_groups_and_else_equal_numbers() -> None:
    for kv in SETS.values():
        groups, slabs = kv.groups(4), kv.slabs(10)
        unit = host_unit(groups, slabs.per_slab)
        if kv.has_state:
            shares = [count / per_slab for count, per_slab in zip(unit, slabs.per_slab, strict=True)]
            assert shares == [1.0 if one.kind is KVKind.STATE else 2.0 for one in groups]
        else:
            assert unit == (1,) * len(groups)
