"""Workspaces: a folder of configs that runs as a sweep, one job of the queue per config."""
