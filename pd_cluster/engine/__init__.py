"""The engine: which tokens to compute when, in which blocks. Pure Python over ids; only `core` drives a worker."""
