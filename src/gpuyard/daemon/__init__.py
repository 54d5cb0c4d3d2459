"""The per-user daemon: its socket, its lock, and how others reach and start it."""
