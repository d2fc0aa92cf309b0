"""`pd-cluster ray`: prefill nodes, decode nodes and routers, placed and kept on a Ray cluster."""
