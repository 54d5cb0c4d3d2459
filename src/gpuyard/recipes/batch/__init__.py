"""Batches: many runs of one command, their limits, and pruning of the runs that produced nothing."""
