"""What crosses the wire: structs, hashes, signatures and the handoff's errors. Imports neither torch nor sockets."""
