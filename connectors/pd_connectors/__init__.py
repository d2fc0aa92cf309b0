"""Moves KV cache blocks between engines: the handoff protocol, the connector API and its implementations."""
