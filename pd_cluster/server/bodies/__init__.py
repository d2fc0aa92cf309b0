"""Bodies of requests, and the fields in them."""
