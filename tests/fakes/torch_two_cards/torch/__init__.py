"""PyTorch as far as its choice of a device goes, on the simulated cards SIM-0 and SIM-1."""

import os

from torch import cuda

if "TORCH_FAILS" in os.environ:
    raise ImportError("libcudart is missing")

__all__ = ["cuda"]
