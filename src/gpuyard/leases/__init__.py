"""The ledger: every use of a device is a lease in one directory, and held means alive."""
