"""Tasks that follow the nodes: health and feed."""
