"""Jobs in containers: the command lines of podman, docker and apptainer, and the removal of containers."""
