"""Render a manifest: read it, load the user's functions, advise on budgets, and follow the run."""
