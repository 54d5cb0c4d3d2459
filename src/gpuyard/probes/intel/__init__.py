"""Intel: `intel_gpu_top`, then `xpu-smi`, then what the kernel itself offers."""
