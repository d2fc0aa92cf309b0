"""A mutation runner: `make mutants`. It plants small bugs one by one and tells which of them no test finds.

targets.py    which files are mutated, and the fast tests that must notice
operators.py  every mutant of a source text, by fixed operators
sample.py     which of them run: drawn by seed, spread over files and operators
runner.py     one process for each mutant, with limits on its CPU time and its life
survivors.py  mutants that may survive, each with its reason: survivors.toml
"""
