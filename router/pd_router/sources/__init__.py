"""Where the router learns of nodes that no flag names. Each source names a whole set, again whenever it changes."""
