"""Parts that several engines use: logs, spawning, outcomes, checks."""
