"""Read assets from disk."""
