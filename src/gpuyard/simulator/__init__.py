"""The simulator: the real controller, policy and store under a virtual clock, over a trace of jobs."""
