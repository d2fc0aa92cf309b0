"""A request on its way through the nodes."""
