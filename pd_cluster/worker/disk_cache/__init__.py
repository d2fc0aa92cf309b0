"""KV blocks in files of this machine, after the host memory's: what survives a restart of the node."""
