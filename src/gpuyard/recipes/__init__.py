"""What users run as a whole: workspaces, batches, rendering, export, uninstall."""
