"""Texts as the world writes them, made at random from pieces: scripts, emoji, marks, blanks, code. Fixed seeds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECES: dict[str, tuple[str, ...]] = {
    "words": ("the", "quick", "Brown", "naïve", "Ærø", "straße", "İstanbul", "ﬁne", "I'm", "don't", "2024", "3.14159"),
    "cjk": ("你好，世界", "漢字かな交じり文", "안녕하세요", "𠮷野家", "𪚥", "龘", "ﾊﾝｶｸ", "、", "。", "「」", "〇"),
    "emoji": ("🦜", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇯🇵", "❤️", "☺", "🤷🏿‍♀️", "⛹🏻", "🫠"),
    "marks": ("é", "ẹ̀́", "Z̷̢̛a̶l̵g̸o̴", "n̈", "ก็", "กำ", "क्षि", "ﷺ", "ষ্ণ", "த்ரு", "ó̥"),
    "rtl": ("שָׁלוֹם", "مرحبا بالعالم", "\u202bעברית\u202c", "۱۲۳", "لا", "\u200fabc\u200e"),
    "blanks": (" ", "  ", "   ", "    ", " " * 7, " " * 16, " " * 33, "\t", "\t\t", "\n", "\n\n", "\r\n", "\n    "),
    "odd blanks": ("\u00a0", "\u2009", "\u3000", "\u200b", "\ufeff", "\u2028", "\v", "\f", "\u1680", "\u2003 "),
    "odd": ("▁", "▁▁", "Ġ", "Ċ", "\ufffd", "<0x0A>", "\x00", "\x7f", "\x1b[0m", "�é", "##ing", "</w>", "\U0010ffff"),
    "code": (
        "def f(x):\n    if x:\n        return [i**2 for i in x]\n",
        "for (int i=0;i<n;++i) {\n\t\ta[i] += b[i];\n\t}\n",
        '{"a": [1, 2.5e-3, null], "ключ": "\\u00e9\\n"}',
        "<div class='x'>&nbsp;</div>",
        "SELECT *\n  FROM t\n WHERE a <> 'b';",
        "- a\n  - b\n    - c\n",
    ),
    "latin, greek, cyrillic": ("Ελληνικά", "Привет", "Čeština", "ℵ₀ ≤ 2^ω", "½ ⅔ ①", "Ⅷ", "ʁaʃ", "ქართული"),
    "markup of models": ("<|im_start|>", "<|im_end|>", "</s>", "<s>", "[INST]", "<think>", "<tool_call>", "<bos>"),
}


def world_texts(number: int, seed: int = 33) -> Iterator[str]:
    """`number` texts of 1 to 12 pieces, often of one kind, sometimes joined by blanks."""
    rng = random.Random(seed)
    kinds = list(PIECES)
    for _ in range(number):
        chosen = rng.sample(kinds, rng.choice((1, 2, 4, len(kinds))))
        pieces = [rng.choice(PIECES[rng.choice(chosen)]) for _ in range(rng.randint(1, 12))]
        yield rng.choice(("", "", " ")).join(pieces)
