"""Captured steps: which are captured, how a step finds the one that fits it, and what is replayed."""
