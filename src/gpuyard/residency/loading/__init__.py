"""Reads assets from disk."""
