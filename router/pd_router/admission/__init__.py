"""Which clients may use the router, and how much: keys, limits of a key, the fair queue, early refusals."""
