"""Cluster engines, which place jobs themselves: submissions, reports about them, and the supervisor on a node."""
