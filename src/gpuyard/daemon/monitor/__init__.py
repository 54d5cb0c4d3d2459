"""Sampling of the machine, and the history and timeline of its devices."""
