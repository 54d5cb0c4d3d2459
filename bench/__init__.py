"""Benchmarks, each compared with a floor that is measured in the same run. `make bench` runs them; none is a test."""
