"""HTTP over the unix socket and TCP: connections, messages, routing, event streams, and who may connect."""
