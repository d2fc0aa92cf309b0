"""Labels that clients write into a prompt for their own servers, and that change at each request.

A label is left out only in its exact form and at its exact place, so that a user's own text is never cut. In the prompt
it would be the first text that differs, and no token after it would be found in the cache.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_http.left_out import LeftOut

_MAX_CHARS = 1024  # those seen have 60 to 90
# In Messages, all of the first block of `system`: its name, then `key=value;` of the version and a digest of the body
_FIRST_SYSTEM_BLOCK = {
    "x-anthropic-billing-header": re.compile(r"x-anthropic-billing-header:(?:\s+[\w.-]+=[^\s;]*;?)+\s*"),
}


def is_label_of_system(text: str, left_out: LeftOut) -> bool:
    """Whether this text, all of the first block of `system`, is a client's label. It is named then."""
    if len(text) > _MAX_CHARS:
        return False
    for name, form in _FIRST_SYSTEM_BLOCK.items():
        if form.fullmatch(text):
            left_out.add("label", f"system.{name}")
            return True
    return False
