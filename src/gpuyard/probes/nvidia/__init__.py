"""NVIDIA: NVML, then `nvidia-smi`."""
