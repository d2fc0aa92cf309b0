"""The cache space of a prompt: the text that goes where salts go, into hashes of blocks, digests and names of a pool.

Prompts with different spaces share no KV. A space is made of an adapter's digest and a salt, and no other pair gives
the same text:

    the base, a salt                 the salt itself, as before there were adapters: releases agree on the hashes
    the base, a salt that begins     NUL, "s", the salt: else clients of the base could write the next row
      with NUL
    an adapter, a salt               NUL, "a", the digest's length, ":", the digest, the salt

The salt of a request with an API key is `tenant/given` (`pd_router`'s `ApiKey.salted`). A tenant has no slash, so these
texts do not meet either.
"""

from __future__ import annotations

_NUL = "\0"


def cache_space(adapter: str, salt: str) -> str:
    """The space of an adapter's digest ("": the base model) and a salt."""
    if adapter:
        return f"{_NUL}a{len(adapter)}:{adapter}{salt}"
    return f"{_NUL}s{salt}" if salt.startswith(_NUL) else salt
