"""Pictures and tables for people, shared by the commands: devices, leases, batches, renders, reports, workspaces."""
