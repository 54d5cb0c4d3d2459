"""What a job says about its progress: read from its output or from a file, and what follows for its end. Pure."""
