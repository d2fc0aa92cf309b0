"""`pd-cluster bench`: load against an endpoint, and the engine alone."""
