"""The operating system: files and folders, locks, clocks, processes, sockets, threads."""
