"""Which tokens to compute when, in which blocks. Pure Python over ids: no torch, no threads, no sockets."""
