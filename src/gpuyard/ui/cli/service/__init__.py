"""Verbs about the queue as a whole and its daemon."""
