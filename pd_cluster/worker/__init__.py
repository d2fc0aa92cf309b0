"""Tensors live here: the KV cache, the forward pass, sampling."""
