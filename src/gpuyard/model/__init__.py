"""Pure: the values that all rooms speak of, and the rules that need nothing else."""
