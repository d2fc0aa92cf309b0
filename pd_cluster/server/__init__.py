"""The node's HTTP side: OpenAI endpoints, tokenizing, streaming, and the handoff between nodes."""
