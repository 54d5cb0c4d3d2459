"""Small helpers over the operating system: clock, files, process identity."""
