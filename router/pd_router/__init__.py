"""The router: the one OpenAI-compatible address in front of prefill and decode nodes. Needs no torch."""
