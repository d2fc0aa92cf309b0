"""A client's call: body, headers, reply."""
