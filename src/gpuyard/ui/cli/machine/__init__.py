"""Commands that need no daemon: devices, leases, a program in the foreground, the simulator."""
