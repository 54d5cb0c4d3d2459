"""Built for CUDA."""

cuda, hip = "13.0", None
