"""The client side of the daemon: find it, start it, talk to it."""
