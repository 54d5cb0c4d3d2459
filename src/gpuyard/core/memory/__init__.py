"""Pure: what jobs need, learned from past runs, and out-of-memory errors."""
