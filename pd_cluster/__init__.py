"""A prefill/decode disaggregated LLM serving cluster: the engine, its nodes and the command line."""

__version__ = "0.1.0"
