"""A generating request: what is asked, its way through the engine, and its handoff."""
