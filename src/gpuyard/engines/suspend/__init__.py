"""Suspends and resumes attempts: moves their GPU memory to RAM and back."""
