"""The nodes, what they report, and the connections to them."""
