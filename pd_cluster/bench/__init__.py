"""`pd-cluster bench serve`: open-loop load on an OpenAI-compatible endpoint, and its report."""
