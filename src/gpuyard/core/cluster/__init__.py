"""Pure rules for engines that place work themselves, such as Slurm and Ray."""
