"""Device memory: CUDA through PyTorch, or simulated on the host."""
