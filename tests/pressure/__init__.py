"""Real memory hogs and pressure from outside against a queue in control groups of its own."""
