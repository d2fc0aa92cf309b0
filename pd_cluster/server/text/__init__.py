"""Messages, templates and tokens."""
