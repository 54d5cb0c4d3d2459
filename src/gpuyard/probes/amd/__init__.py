"""AMD: the `amdsmi` library, then `amd-smi`, `rocm-smi`, `radeontop`."""
