"""The HTTP floor of router and nodes: replies, errors, settings, bounds on bytes, time and connections."""
