"""The file with API keys: what it may say, what it finds, and what it never repeats."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router.admission.api_keys import ApiKey, KeyRing, new_key, parse_keys

SECRET = "pd-not-a-real-key"
DIGEST = sha256(SECRET.encode()).hexdigest()
TENANTS = st.from_regex(r"[A-Za-z0-9._\-]{0,8}", fullmatch=True)


def line(**fields: Any) -> bytes:
    return json.dumps({"name": "one", "sha256": DIGEST, **fields}).encode()


def test_a_new_key_is_found_by_what_clients_send() -> None:
    key, text = new_key("team-a")
    ring = parse_keys(text.encode())
    assert key not in text
    assert len(key) == len("pd-") + 43
    for headers in (
        [(b"authorization", b"Bearer " + key.encode())],
        [(b"authorization", b"bearer  " + key.encode())],
        [(b"x-api-key", key.encode())],
        [(b"authorization", b"Bearer other"), (b"x-api-key", key.encode())],
    ):
        assert ring.find(headers) is ring.by_name["team-a"]
    for headers in (
        [],
        [(b"authorization", key.encode())],
        [(b"authorization", b"Basic " + key.encode())],
        [(b"authorization", b"Bearer " + key.encode() + b"x")],
        [(b"cookie", key.encode())],
        [(b"x-api-key", DIGEST.encode())],
    ):
        assert ring.find(headers) is None


def test_an_old_and_a_new_key_may_be_valid_at_once() -> None:
    other = sha256(b"other").hexdigest()
    ring = parse_keys(line(sha256=[DIGEST, other]))
    assert ring.find([(b"x-api-key", b"other")]) is ring.find([(b"x-api-key", SECRET.encode())]) is not None


def test_a_name_may_be_a_salt_where_it_salts_nothing() -> None:
    other = {"name": "two", "sha256": "0" * 64, "salt": "one"}
    for salt in ("one", "another", ""):
        ring = parse_keys(line(salt=salt) + b"\n" + line(**other))
        assert ring.by_name["one"].salted("") == (f"{salt}/" if salt else "")
    parse_keys(line(salt="one"))


def test_blank_lines_and_remarks_do_not_count() -> None:
    ring = parse_keys(b"# ours\n\n" + line() + b"\r\n  # theirs\n" + line(name="two", sha256="0" * 64))
    assert set(ring.by_name) == {"one", "two"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "there is no key"),
        (b"# nothing\n", "there is no key"),
        (b"{", "line 1"),
        (b"\n" + SECRET.encode(), "line 2"),
        (b"\xff", "line 1"),
        (b"[" * 100_000, "line 1"),
        (line() + b"\n" + line(name="two"), "a hash is given twice"),
        (line() + b"\n" + line(sha256="0" * 64), "a name is given twice"),
        (line(sha256=[DIGEST, DIGEST]), "a hash is given twice"),
        (line() + b"\n" + line(name="two", sha256="0" * 64, salt="one"), "a name is another key's salt"),
        (line(name="two", sha256="0" * 64, salt="one") + b"\n" + line(), "a name is another key's salt"),
        (line(key=SECRET), "unknown field"),
        (line(sha256=SECRET), "sha256 is not valid"),
        (line(sha256=DIGEST.upper()), "sha256 is not valid"),
        (line(sha256=[]), "sha256 is not valid"),
        (line(name=""), "name is not valid"),
        (line(name="a/b"), "name is not valid"),
        (line(name="a\n"), "name is not valid"),
        (line(salt="a/b"), "salt is not valid"),
        (line(weight=0), "weight is not valid"),
        (line(priority=1 << 31), "priority is not valid"),
        (line(concurrency=-1), "limits is not valid"),
        (line(concurrency=1.5), "concurrency"),
        (b'{"name": "a", "sha256": "' + DIGEST.encode() + b'", "tokens_per_minute": 1e999}', "line 1"),
    ],
)
def test_a_bad_file_is_refused_and_not_repeated(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse_keys(content)
    assert SECRET not in str(caught.value)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="name is not valid"):
        new_key("a b")


@pytest.mark.long
@given(TENANTS, st.text(max_size=8), TENANTS, st.text(max_size=8))
def test_no_two_tenants_have_a_salt_in_common(one: str, given_one: str, other: str, given_other: str) -> None:
    salts = [ApiKey(name="n", sha256="", salt=s).salted(g) for s, g in ((one, given_one), (other, given_other))]
    assert (salts[0] == salts[1]) == ((one, given_one) == (other, given_other))


def test_the_salt_of_a_key_is_its_name_unless_it_has_one() -> None:
    assert ApiKey(name="n", sha256="").salted("") == "n/"
    assert ApiKey(name="n", sha256="", salt="team").salted("x") == "team/x"
    assert ApiKey(name="n", sha256="", salt="").salted("") == ""


def test_a_ring_needs_a_key() -> None:
    with pytest.raises(ValueError, match="no key"):
        KeyRing(())
