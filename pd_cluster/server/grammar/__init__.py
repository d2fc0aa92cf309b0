"""Grammars of answers: written, checked, and what they come from."""
