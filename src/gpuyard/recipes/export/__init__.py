"""Export waiting jobs as a shell script that submits them to Slurm or Ray without gpuyard."""
