"""What is kept of a request: metrics, spans, log lines."""
