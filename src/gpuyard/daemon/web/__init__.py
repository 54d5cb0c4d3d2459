"""The web page's listener: the daemon's routes over TCP for one user's browser, locked for everyone else."""
