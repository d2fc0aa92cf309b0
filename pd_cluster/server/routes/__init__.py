"""Endpoints: from a request to its answer, and what they say of themselves."""
