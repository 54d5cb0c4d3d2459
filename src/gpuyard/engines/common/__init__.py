"""Parts that several engines use: starting programs, logs, outcomes, results of code snapshots."""
