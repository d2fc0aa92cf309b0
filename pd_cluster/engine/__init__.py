"""The engine: which tokens to compute when, in which blocks. Pure Python over ids, except `core`, which drives a worker."""
