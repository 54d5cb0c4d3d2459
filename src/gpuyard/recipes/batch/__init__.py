"""A batch: many runs of one command, and pruning the runs that produced nothing."""
