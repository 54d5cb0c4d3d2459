"""Counters and the Prometheus text of `/metrics`."""
