"""The router: the one OpenAI-compatible address in front of prefill and decode nodes. Needs no torch.

Folders, each of which imports from those after it only: process, edge, requests, watch, records, sources, policy,
nodes, calls.
"""
