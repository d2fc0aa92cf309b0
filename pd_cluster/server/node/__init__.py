"""What the node says of itself: metrics, feed, role, versions."""
