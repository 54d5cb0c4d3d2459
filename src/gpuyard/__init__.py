"""gpuyard: watch GPUs, decide when and where the next piece of work runs, and keep it safe."""

__version__ = "0.1.0"
