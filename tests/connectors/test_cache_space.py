"""The space of an adapter and a salt: no two pairs have one, and those of the base are what they were."""

from __future__ import annotations

from hashlib import blake2b
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connectors.protocol.cache_space import cache_space
from pd_connectors.protocol.hashing import prompt_digest, root_hash
from pd_router.admission.api_keys import ApiKey

# Few characters, so that texts which could be mistaken for an encoding are drawn often
SALTS = st.one_of(st.text("\0as1:/ab", max_size=12), st.text(max_size=8))
ADAPTERS = st.one_of(st.just(""), st.text("0123456789abcdef:/\0s", max_size=12))
TENANTS = st.text("ab1.", max_size=4)  # as a file of keys may have them
Triple = tuple[str, str, str]
TRIPLES = st.tuples(ADAPTERS, TENANTS, SALTS)


def of_key(triple: Triple) -> str:
    """The space of a request that comes with an API key through a router."""
    adapter, tenant, given_salt = triple
    return cache_space(adapter, ApiKey(name="n", sha256="", salt=tenant).salted(given_salt))


@pytest.mark.long
@given(TRIPLES, TRIPLES)
@settings(max_examples=40)
def test_spaces_of_other_triples_differ(one: Triple, other: Triple) -> None:
    """Adapter, salt of the key, salt of the client."""
    assert (of_key(one) == of_key(other)) == (one == other)


@pytest.mark.long
@given(st.tuples(ADAPTERS, SALTS), st.tuples(ADAPTERS, SALTS))
def test_spaces_without_keys_differ(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (cache_space(*one) == cache_space(*other)) == (one == other)


def texts(letters: str, most: int) -> list[str]:
    """All of up to `most` letters."""
    return ["".join(one) for size in range(most + 1) for one in product(letters, repeat=size)]


def test_no_character_moves_from_one_part_to_the_next() -> None:
    """All short triples: two that are drawn seldom are two ways to cut one text."""
    triples = list(product(texts("01:", 3), texts("1a", 1), texts("\0a1:/", 3)))
    assert len({of_key(triple) for triple in triples}) == len(triples) > 18_000


@pytest.mark.long
@given(ADAPTERS.filter(bool), SALTS, SALTS)
def test_a_client_of_the_base_cannot_write_an_adapters_space(adapter: str, salt: str, inner: str) -> None:
    """Also one that knows the digest, and sends the space itself as its salt."""
    space = cache_space(adapter, salt)
    assert cache_space("", space) != space
    assert cache_space("", space + inner) != cache_space(adapter, salt + inner)
    assert cache_space("other", space) != space


@pytest.mark.long
@given(SALTS.filter(lambda salt: not salt.startswith("\0")))
def test_the_base_has_the_hashes_of_older_releases(salt: str) -> None:
    """During an upgrade nodes of both releases read each other's blocks."""
    old = blake2b(salt.encode(), digest_size=16, person=b"pd-kv-root").digest()
    assert root_hash(cache_space("", salt)) == old


def test_tickets_of_another_adapter_are_for_another_prompt() -> None:
    spaces = [cache_space(adapter, salt) for adapter in ("", "0" * 32, "0" * 31 + "1") for salt in ("", "tenant/", "a")]
    assert len({prompt_digest([1, 2, 3], space) for space in spaces}) == len(spaces)
