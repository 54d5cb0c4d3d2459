"""Cluster engines, which place jobs themselves: submissions, reports about them, and what runs on the nodes."""
