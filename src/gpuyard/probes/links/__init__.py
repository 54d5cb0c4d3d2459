"""How devices are linked: the kernel's PCI tree, NVML, and vendors' tools."""
