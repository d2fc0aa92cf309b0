"""How many nodes of each role: the engine's own schedulers and the router's own choice in virtual time. No torch."""
