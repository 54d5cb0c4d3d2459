"""Verbs about jobs: submit, list, explain, change, wait."""
