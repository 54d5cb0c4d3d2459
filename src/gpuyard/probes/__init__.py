"""Probes: every way to read the devices and the host; each of them may fail."""
