"""Verbs about this machine: devices, leases, a program in the foreground, doctor, the simulator; and `top`."""
