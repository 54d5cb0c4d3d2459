"""Runs a workspace's task on a terminal of its own, shown in tmux."""
