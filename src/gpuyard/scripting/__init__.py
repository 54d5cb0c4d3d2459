"""`GPUScheduler` and what scripts ask about GPUs."""
