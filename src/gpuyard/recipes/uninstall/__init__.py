"""What `gpuyard uninstall` does: find every place that holds files of this user's gpuyard, and remove them."""
