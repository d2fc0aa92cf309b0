"""What the HTTP servers of router and nodes share: bounds on bytes, time and connections. Needs no torch."""
