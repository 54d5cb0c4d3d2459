"""The Python interface for scripts: GPUScheduler, and queries about GPUs."""
