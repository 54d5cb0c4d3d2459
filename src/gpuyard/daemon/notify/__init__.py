"""Tells people what has happened: the announcer listens, the worker waits its turn, a child of its own sends."""
