"""The ledger: leases and tickets as locked files in one directory; a held lock means a live holder."""
