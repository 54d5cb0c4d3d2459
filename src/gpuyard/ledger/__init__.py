"""The ledger: leases and tickets as locked files in one directory; a locked file means a live holder."""
