"""Intel: `intel_gpu_top`, then `xpu-smi`, then files of the kernel."""
