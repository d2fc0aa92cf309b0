"""How each API writes an answer."""
