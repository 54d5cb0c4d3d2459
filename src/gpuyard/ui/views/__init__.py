"""Views that commands share: devices, leases, batches, renders, reports, workspaces."""
