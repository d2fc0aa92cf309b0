"""Developers' measurements. Not installed: run `python -m benchmarks NAME` at the root of a checkout.

Each benchmark is a module with `main(arguments) -> exit status` and a line in `benchmarks.__main__.BENCHMARKS`.
`pd_cluster` never imports this package; what users measure with is `pd_cluster.bench`.
"""
