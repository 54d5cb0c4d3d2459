"""A queue as a script for somebody else: what waits here, submitted to Slurm or Ray by those who have no gpuyard."""
