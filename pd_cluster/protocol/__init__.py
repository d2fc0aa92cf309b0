"""What the API process and the engine process say to each other. No torch, no sockets."""
