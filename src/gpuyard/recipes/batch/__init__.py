"""Batches: many runs of one command, and pruning of the runs that produced nothing."""
