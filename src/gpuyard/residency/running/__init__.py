"""Run the units of a manifest: workers, outputs, status."""
