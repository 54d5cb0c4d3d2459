"""Runs attempts on this machine, under a keeper that outlives the daemon."""
