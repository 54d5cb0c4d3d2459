"""Assets in RAM and VRAM: read, moved and lent to workers; a device is CUDA through PyTorch, or simulated."""
