"""A workspace: a folder of configs that becomes a finished sweep, each config a job of the queue."""
