"""Genuine traffic after a few edits, of bytes or of a JSON value. Strategies for Hypothesis."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

MAX_EDITS = 4
EXAMPLES = (  # of one property, against live processes
    25,
    pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
)
SPLICES = (
    b"\0", b"\r\n", b"\n", b"\r\n\r\n", b" ", b"\t", b":", b"\xff", b"-1", b"99999999999999999999", b"0\r\n\r\n",
    b"%00", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Expect: 100-continue\r\n", b'{"', b"]",
    b"null",
)  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308, "", "x", "\0", "\ud7ff", "x" * 5000, [],
    [[]], [None], {}, {"a": {}}, "http://127.0.0.1:1", "do_remote_prefill",
)  # fmt: skip


def fuzzing(examples: int) -> settings:
    """The same examples each time, however long one takes."""
    return settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


_JUNK = st.sampled_from(JUNK).map(copy.deepcopy)


@st.composite
def mutated_bytes(draw: st.DrawFn, genuine: bytes) -> bytes:
    """`genuine` after 1 to MAX_EDITS edits: bytes flipped, cut out, doubled, cut off, put in."""
    raw = bytearray(genuine)
    for _ in range(draw(st.integers(1, MAX_EDITS))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        to = draw(st.integers(at, min(len(raw), at + 40)))
        match draw(st.sampled_from(("flip", "flip", "cut", "double", "end", "put"))):
            case "flip" if raw:
                raw[at] ^= draw(st.integers(1, 255))
            case "cut":
                del raw[at:to]
            case "double":
                raw[at:at] = raw[at:to]
            case "end":
                del raw[max(at, len(raw) // 2) :]
            case _:
                raw[at:at] = draw(st.sampled_from(SPLICES))
    return bytes(raw)


@st.composite
def mutated_json(draw: st.DrawFn, genuine: Any) -> Any:
    """`genuine` after 1 to MAX_EDITS edits of its places: values replaced, names taken out or added, texts edited."""
    value = copy.deepcopy(genuine)
    for _ in range(draw(st.integers(1, MAX_EDITS))):
        places = _places(value)
        if not places:
            return draw(_JUNK)
        holder, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(("junk", "junk", "remove", "add", "edit", "edit"))):
            case "remove":
                del holder[key]
            case "add" if isinstance(holder, dict):
                holder[draw(st.sampled_from(("x", "", "ticket", "offer", "remote_host")))] = draw(_JUNK)
            case "edit" if isinstance(holder[key], str) and holder[key]:
                raw = draw(mutated_bytes(holder[key].encode()))
                holder[key] = raw.decode(errors="replace")
            case "edit" if isinstance(holder[key], int):
                holder[key] += draw(st.sampled_from((-1, 1, 2**32)))
            case _:
                holder[key] = draw(_JUNK)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, one in inner for place in [(value, key), *_places(one)]]
