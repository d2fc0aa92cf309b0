"""A regular package: some dependency (cufile-python, by way of LMCache) installs a top-level `tests` of its own."""
