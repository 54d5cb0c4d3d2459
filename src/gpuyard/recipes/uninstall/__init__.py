"""`gpuyard uninstall`: find all files of this user's gpuyard, and remove them."""
