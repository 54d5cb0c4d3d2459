"""HTTP over the unix socket and TCP: parsing, connections, routing, event streams."""
