"""Eyes: every way of reading the devices and the host, each allowed to fail."""
