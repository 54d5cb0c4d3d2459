"""The machine while the daemon runs: samples, devices, the usage of the last day, and the progress of jobs."""
