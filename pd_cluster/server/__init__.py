"""The node's HTTP side: OpenAI endpoints, tokenizing, streaming, and the handoff between nodes.

Folders, each of which imports from those after it only: routes, shapes, requests, node, grammar, params, tools, text,
bodies. `state.py` stands between requests and node.
"""
