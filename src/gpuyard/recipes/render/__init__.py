"""Rendering a manifest: what it asks for, whom it calls, what it costs, and the run itself; over the residency."""
