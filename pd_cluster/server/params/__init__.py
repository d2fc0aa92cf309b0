"""Sampling parameters, from the fields of a body."""
