"""How many nodes read and how many decode, kept to the load while a cluster runs. `decide` is pure; no torch."""
