"""`pd-cluster ray`: places prefill nodes, decode nodes and routers on a Ray cluster and keeps them running."""
